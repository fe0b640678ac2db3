"""The words of demonstrations: queries made of what is known, and short thoughts that copy what was shown."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from srl.data.stated_values import find_text

QUOTED_WORDS = 16
"""The most words of a passage that a thought quotes, unless the answer alone is longer."""

_STOP = """
    a an the of in on at to for from by with and or as is are was were be been being do does did has have
    had who whom whose what which when where why how that this these those it its their his her there than
    can could would will shall should may might must into about many much also some such if so
"""
STOP_WORDS = frozenset(_STOP.split())
_COMMON = """
    album author award birth born buried burial capital cause child citizenship city company composer
    continent country county date death detention died director editor educated employer father film founded
    inception language live located location made mother movie name native number origin part people
    performer person place played plays producer publication publisher received sibling song spouse state
    team wrote written year
"""
COMMON_WORDS = STOP_WORDS.union(_COMMON.split())
"""Words that name nobody and nothing, which a query may have beside what is known."""

_WORD = re.compile(r"\w+(?:[.'’&/-]\w+)*")
_ENDINGS = re.compile(r"(?:'s|’s|ies|ied|y|es|ed|e|s|ing)$")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]*[A-Z0-9])")


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def content_words(text: str) -> str:
    """The words of a text in their order, without question words and the like."""
    return " ".join(word for word in words_of(text) if word.lower() not in STOP_WORDS)


def names_in(text: str) -> str:
    """The capitalised words and the numbers of a text, but for its first word."""
    return " ".join(word for word in words_of(text)[1:] if word[0].isupper() or word[0].isdigit())


def known_words(text: str, texts: Sequence[str]) -> list[str]:
    """The words of `text` that one of `texts` has too, up to their endings, and those that name nothing."""
    have = {_without_ending(word) for each in texts for word in words_of(each)}
    return [
        word
        for word in words_of(text)
        if _without_ending(word) in have or word.lower() in STOP_WORDS or word in COMMON_WORDS
    ]


def _without_ending(word: str) -> str:
    """A word in lower case without the endings of plurals and tenses, roughly."""
    return _ENDINGS.sub("", word.lower()) if len(word) > 3 else word.lower()


def as_known(name: str, texts: Sequence[str]) -> str | None:
    """`name` as the first of `texts` that has it writes it."""
    for text in texts:
        if (span := find_text(name, text)) is not None:
            closes = name.endswith(")") and text[span[1] : span[1] + 1] == ")"
            return text[span[0] : span[1] + closes]
    return None


_MISSED = (
    "These passages do not say it, so I search again.",
    "This is not what I need, so I try other words.",
    "The answer is not here, so I ask in another way.",
)
_QUOTES = ('Doc {d} says "{q}".', 'I read in Doc {d}: "{q}".', 'According to Doc {d}, "{q}".')


def missed(rng: random.Random) -> str:
    """The thought after a search that did not bring its passage."""
    return rng.choice(_MISSED)


def quotes(quoted: str, rank: int, rng: random.Random) -> str:
    """What was read, in the passage's own words."""
    return rng.choice(_QUOTES).format(d=rank, q=quoted.replace('"', "'"))


def sentences(text: str) -> list[str]:
    """The sentences of a text, split where a capital letter or a number follows a stop."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    pairs = zip([0, *ends], [*ends, len(text)], strict=True)
    return [text[begin:end].strip() for begin, end in pairs]


def best_sentence(candidates: Sequence[str], question: str, value: str) -> str | None:
    """Of the sentences that state `value` (any if it is empty), the one with most of the question's words."""
    words = _lower(content_words(question))
    stating = [each for each in candidates if each and (not value or find_text(value, each) is not None)]
    return max(stating, key=lambda each: len(words & _lower(each)), default=None)


def excerpt(sentence: str, question: str, value: str) -> str:
    """At most `QUOTED_WORDS` of a sentence, with `value` and most of the question's words, less the stop."""
    words = sentence.split()
    first, last = _place(sentence, value)
    limit = max(QUOTED_WORDS, last - first)
    question_words = _lower(content_words(question))
    starts: Iterable[int] = [0]
    if value:
        starts = range(max(0, last - limit), min(first, max(0, len(words) - limit)) + 1)
    start = max(starts, key=lambda at: len(question_words & _lower(" ".join(words[at : at + limit]))))
    return " ".join(words[start : start + limit]).rstrip(".;,: ")


def _lower(text: str) -> set[str]:
    return {word.lower() for word in words_of(text)}


def _place(sentence: str, value: str) -> tuple[int, int]:
    """The words of a sentence, split at spaces, that hold `value`: the first, and the one after the last."""
    span = find_text(value, sentence) if value else None
    if span is None:
        return 0, 0
    begins_inside = span[0] > 0 and not sentence[span[0] - 1].isspace()
    return len(sentence[: span[0]].split()) - begins_inside, len(sentence[: span[1]].split())
