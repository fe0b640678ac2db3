"""Converts an API's results to hits: plain text, each URL once, in the API's order."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b

from srl.trajectory import Hit, Passage
from srl_web.api import Result

_MARKUP = re.compile(r"</?(?:b|br|em|i|mark|span|strong)(?:\s[^<>]*)?/?>", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_WORD = re.compile(r"\w+")


def hits_of(results: Iterable[Result], k: int, pages: Mapping[str, str]) -> list[Hit]:
    """The first `k` results with different URLs; the score of rank r is 1/r.

    `pages` has texts by URL that replace the results' own.
    """
    unique: dict[str, Passage] = {}
    for result in results:
        passage = _passage(result, pages.get(result.url, result.text))
        unique.setdefault(passage.id, passage)
    first = list(unique.values())[:k]
    return [Hit(passage, 1 / rank) for rank, passage in enumerate(first, start=1)]


def cleaned(results: Iterable[Result]) -> list[Result]:
    """The results as plain text: no markup, entities, control characters or lone surrogates."""
    return [
        Result(" ".join(plain(title).split()), " ".join(plain(text).split()), encodable(url).strip())
        for title, text, url in results
    ]


def plain(text: str) -> str:
    """`text` without the markup, entities and control characters of snippets."""
    return _CONTROL.sub(" ", html.unescape(_MARKUP.sub("", encodable(text))))


def encodable(text: str) -> str:
    """`text` with unpaired surrogates, which UTF-8 cannot encode, replaced."""
    return text.encode("utf-8", "replace").decode()


def around(text: str, wanted: str, limit: int) -> str:
    """The part of `text`, at most `limit` characters, that shares most words with `wanted`; empty if no word.

    It consists of whole paragraphs if they fit: the best one, then its neighbours, following ones first.
    """
    words = set(_WORD.findall(wanted.casefold()))
    paragraphs = [line.strip() for line in text.splitlines() if line.strip()]
    shared = [len(words & set(_WORD.findall(line.casefold()))) for line in paragraphs]
    if not any(shared):
        return ""
    first = last = shared.index(max(shared))
    size = len(paragraphs[first])
    if size > limit:
        return _densest(paragraphs[first], words, limit)
    while True:
        if last + 1 < len(paragraphs) and size + 1 + len(paragraphs[last + 1]) <= limit:
            last += 1
            size += 1 + len(paragraphs[last])
        elif first > 0 and size + 1 + len(paragraphs[first - 1]) <= limit:
            first -= 1
            size += 1 + len(paragraphs[first])
        else:
            return "\n".join(paragraphs[first : last + 1])


def _densest(paragraph: str, words: set[str], limit: int) -> str:
    """The part of `paragraph`, in whole words, with the most occurrences of `words`."""
    spans = [
        (match.start(), match.end(), match[0].casefold() in words) for match in _WORD.finditer(paragraph)
    ]
    best, most, found, begin = 0, 0, 0, 0
    for start, end, wanted in spans:
        found += wanted
        while begin < len(spans) and end - spans[begin][0] > limit and spans[begin][0] <= start:
            found -= spans[begin][2]
            begin += 1
        if found > most:
            best, most = begin, found
    start = spans[best][0] if most else 0
    cut = paragraph[start : start + limit]
    ends = start + limit >= len(paragraph) or not paragraph[start + limit].isalnum()
    return cut.strip() if ends else cut.rsplit(None, 1)[0].strip()


def share_of(text: str, wanted: str) -> float:
    """The fraction of the words of `wanted` that occur in `text`, from 0 to 1."""
    words = set(_WORD.findall(wanted.casefold()))
    return len(words & set(_WORD.findall(text.casefold()))) / len(words) if words else 0.0


def _passage(result: Result, text: str) -> Passage:
    contents = f'"{result.title}"\n{text}'
    digest = blake2b(contents.encode(), digest_size=6).hexdigest()
    return Passage(result.url or f"web:{digest}", contents)
