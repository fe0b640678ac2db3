"""From text to terms: lower case, no accents, words, no stop words, stems."""

from __future__ import annotations

import re
import unicodedata
from threading import Lock

from bm25s.stopwords import STOPWORDS_EN

_POSSESSIVE = re.compile(r"['’]s\b")
_WORD = re.compile(r"\w+")
_ACCENTS = re.compile("[\u0300-\u036f]")

STOP_WORDS: dict[str, frozenset[str]] = {"english": frozenset(STOPWORDS_EN), "none": frozenset()}
"""`english` is Lucene's list of 33 words."""


def words(text: str) -> list[str]:
    """The words of `text` in lower case, without accents and possessive 's, in their order.

    >>> words("Beyoncé's 2nd album")
    ['beyonce', '2nd', 'album']
    """
    text = text.casefold()
    if not text.isascii():
        text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text))
    return _WORD.findall(_POSSESSIVE.sub("", text))


class Analyzer:
    """Texts to terms; the same one for passages and queries. Safe to use from many threads."""

    def __init__(self, stopwords: str = "english", stemmer: str = "english") -> None:
        self._stopwords = STOP_WORDS[stopwords]
        self._stem = _stemmer(stemmer)
        self._lock = Lock()  # a Snowball stemmer holds a buffer of its own

    def __call__(self, text: str) -> list[str]:
        kept = [word for word in words(text) if word not in self._stopwords]
        with self._lock:
            return self._stem(kept)


def _stemmer(name: str):
    """A function from words to stems; `name` is an algorithm of Snowball, or none."""
    if name == "none":
        return list
    from Stemmer import Stemmer

    return Stemmer(name).stemWords
