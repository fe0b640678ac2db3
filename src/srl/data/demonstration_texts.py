"""The words of demonstrations: queries made of what is known, and short thoughts that copy what was shown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

QUOTED_WORDS = 16
"""The most words of a passage that a thought quotes, unless the answer alone is longer."""

_STOP = """
    a an the of in on at to for from by with and or as is are was were be been being do does did has have
    had who whom whose what which when where why how that this these those it its their his her there than
    can could would will shall should may might must into about many much also some such if so
"""
STOP_WORDS = frozenset(_STOP.split())

Span = tuple[int, int]

_WORD = re.compile(r"\w+(?:[.'’&/-]\w+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)]*\s+(?=[\"'“‘(]*[A-Z0-9])")


def find_text(value: str, text: str) -> Span | None:
    """Where `value` stands in `text` as whole words: as it is written, else in other case or punctuation."""
    value = value.strip()
    words = r"\W+".join(map(re.escape, re.findall(r"\w+", value)))
    for pattern, flags in ((re.escape(value), 0), (words, re.IGNORECASE)):
        if pattern and (match := re.search(rf"(?<!\w){pattern}(?!\w)", text, flags)):
            return match.span()
    return None


def words_of(text: str) -> list[str]:
    return _WORD.findall(text)


def content_words(text: str) -> str:
    """The words of a text in their order, without question words and the like."""
    return " ".join(word for word in words_of(text) if word.lower() not in STOP_WORDS)


def as_known(name: str, texts: Sequence[str]) -> str | None:
    """`name` as the first of `texts` that has it writes it."""
    for text in texts:
        if (span := find_text(name, text)) is not None:
            closes = name.endswith(")") and text[span[1] : span[1] + 1] == ")"
            return text[span[0] : span[1] + closes]
    return None


def quotes(quoted: str, rank: int) -> str:
    """What was read, in the passage's own words."""
    words = quoted.replace('"', "'")
    return f'Doc {rank} says "{words}".'


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


def excerpt(sentence: str, question: str, value: str, limit: int = QUOTED_WORDS) -> str:
    """At most `limit` words of a sentence, with `value` and most of the question's words, less the stop."""
    words = sentence.split()
    first, last = _place(sentence, value)
    limit = max(limit, last - first)
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
