"""Text analysis: lower-cases, splits into words, removes stop words, stems, removes accents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from threading import Lock

from srl_bm25.options import StopWords

_MARKS = "".join(chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c)) in ("Mn", "Mc"))
_POSSESSIVE = re.compile(r"'s\b")
_IN_NUMBER = r"[.,](?<=\d[.,])(?=\d)"
_IN_WORD = r"['.,](?:(?<=[^\W\d]')(?=[^\W\d])|(?<=\d[.,])(?=\d))"
"""Punctuation inside a word that does not end it, as in Unicode's rules (UAX 29) and Lucene's tokenizer."""

_ASCII_ENGLISH = re.compile(rf"\w+(?:{_IN_WORD}\w+)*")
_ASCII_OTHER = re.compile(rf"\w+(?:{_IN_NUMBER}\w+)*")
_ENGLISH_WORD = re.compile(rf"\w[\w{_MARKS}]*(?:{_IN_WORD}\w[\w{_MARKS}]*)*")
_OTHER_WORD = re.compile(rf"\w[\w{_MARKS}]*(?:{_IN_NUMBER}\w[\w{_MARKS}]*)*")
"""In other languages an apostrophe may separate two words (l'avion). Devanagari, Tamil, Thai and others write
vowels as marks, which `\\w` does not match, so they are listed."""

_PLAIN = [("’", "'"), ("–", "-"), ("—", "-"), ("“", '"'), ("”", '"'), ("…", " "), ("\xa0", " "), ("™", " "),
          ("℠", " "), ("№", " ")]  # fmt: skip
_ACCENTS = re.compile("[\u0300-\u036f]")
_PACKED = (
    "\u3005\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff"
)
_IS_PACKED = re.compile(f"[{_PACKED}]")
_RUN = re.compile(f"[{_PACKED}]+|[^{_PACKED}]+")
"""Runs of Chinese, Japanese and Korean characters, and of others."""

ENGLISH = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with"
)
_REMEMBERED = 1 << 21
_WITHOUT_ACCENTS = frozenset({"english", "porter", "none"})


def words(text: str, accents: bool = False) -> list[str]:
    """The words of `text` in order, in lower case, without possessive 's, with or without `accents`.

    Chinese, Japanese and Korean text, which is not split by spaces, becomes overlapping pairs of
    characters, as in Lucene's CJK analyzer.

    >>> words("Beyoncé's 2nd album didn't sell 1,000")
    ['beyonce', '2nd', 'album', "didn't", 'sell', '1,000']
    >>> words("東京タワー")
    ['東京', '京タ', 'タワ', 'ワー']
    """
    text = text.casefold()
    if not text.isascii():
        text = _plain(text)
        text = (unicodedata.normalize("NFKC", text) if accents else _fold(text)).casefold()
    if "'s" in text:
        text = _POSSESSIVE.sub("", text)
    if text.isascii():
        return (_ASCII_OTHER if accents else _ASCII_ENGLISH).findall(text)
    matches: list[str] = (_OTHER_WORD if accents else _ENGLISH_WORD).findall(text)
    return [part for word in matches for part in _parts(word)] if _IS_PACKED.search(text) else matches


def _plain(text: str) -> str:
    """`text` with common typographic characters replaced by ASCII: most texts are then ASCII, which is
    analysed faster. Signs that normalising would make letters end the word before them, as in Lucene."""
    for sign, plain in _PLAIN:
        text = text.replace(sign, plain)
    return text


def _parts(word: str) -> list[str]:
    """`word`, with Chinese, Japanese and Korean runs split into pairs of characters."""
    parts: list[str] = []
    for run in _RUN.findall(word):
        packed = len(run) > 2 and _IS_PACKED.match(run)
        parts.extend([run[start : start + 2] for start in range(len(run) - 1)] if packed else [run])
    return parts


def _fold(text: str) -> str:
    """`text` without the accents of Latin, Greek and Cyrillic letters; other marks are kept."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFC", _ACCENTS.sub("", unicodedata.normalize("NFKD", text)))


def stop_words(name: StopWords) -> frozenset[str]:
    """Lucene's 33 stop words for English, bm25s's lists for other languages, in lower case."""
    if name == "none":
        return frozenset()
    if name == "english":
        return frozenset(ENGLISH.split())
    from bm25s import stopwords as lists  # imported here because the import is slow

    words = getattr(lists, f"STOPWORDS_{name.upper()}")
    return frozenset(unicodedata.normalize("NFKC", word.casefold()) for word in words)


class Analyzer:
    """Converts texts to terms, in the same way for passages and queries. Thread-safe.

    Accents are removed before English stemming, which does not support them. In other languages stems
    depend on accents, so they are removed afterwards.
    """

    def __init__(self, stopwords: StopWords = "english", stemmer: str = "english") -> None:
        self._accents = stemmer not in _WITHOUT_ACCENTS
        stop_list = stop_words(stopwords)
        self._terms = _Terms(
            stop_list if self._accents else frozenset(map(_fold, stop_list)), _stemmer(stemmer), self._accents
        )

    def __call__(self, text: str) -> list[str]:
        terms = self._terms
        return [term for word in self.words(text) if (term := terms[word])]

    def words(self, text: str) -> list[str]:
        """The words of `text`, including stop words."""
        return words(text, self._accents)

    def term(self, word: str) -> str:
        """The term of a word; "" for a stop word."""
        return self._terms[word]


class _Terms(dict[str, str]):
    """A cache of words to terms, "" for a stop word."""

    def __init__(self, stopwords: frozenset[str], stem: Callable[[str], str], fold: bool) -> None:
        super().__init__()
        self._stopwords, self._stem, self._fold = stopwords, stem, fold
        self._lock = Lock()  # a Snowball stemmer is not thread-safe

    def __missing__(self, word: str) -> str:
        with self._lock:
            stem = "" if word in self._stopwords else self._stem(word)
            if len(self) >= _REMEMBERED:
                self.clear()
            self[word] = term = _fold(stem) if self._fold else stem
        return term


def _stemmer(name: str) -> Callable[[str], str]:
    """A function from a word to its stem; `name` is a Snowball algorithm, or `none`."""
    if name == "none":
        return str
    from Stemmer import Stemmer

    stem: Callable[[str], str] = Stemmer(name).stemWord
    if name == "porter":  # like Porter's own program and Lucene, do not stem "us" or "is"
        return lambda word: stem(word) if len(word) > 2 else word
    return stem
