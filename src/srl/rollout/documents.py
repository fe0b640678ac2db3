"""The tools `open` and `find`: whole documents of which a search has shown a passage."""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from srl.trajectory import DocumentTool, Hit, Passage, Search

OPENERS = frozenset({"open", "find"})
"""The tools that take the id of a document, so that passages are shown with theirs."""
MOST_CHARS = 1_000_000
"""Of a document; what follows is not looked at."""
_MOST_EXCERPTS, _AROUND, _LONGEST_TEXT = 10, 150, 500
_MOST_KEPT = 64
"""Documents whose pages are kept."""
_AT_ONCE = 100
"""Pieces of a document whose tokens are counted in one go."""
_GLUE_TOKENS = 64
"""Tokens of an observation that a page leaves, for its heading and for what a chat template adds."""
_PIECE = re.compile(r"\s*(?:\S.{0,398}?[.!?\n](?=\s)|\S.{0,398}(?:(?=\s)|\Z)|\S{1,400})", re.DOTALL)
"""A sentence, or as much of a long one as fits."""

_ID = {"type": "string", "description": "The id of a document, as a search has shown it."}


class Document:
    """A document's text; `starts` are the places at which its pages begin."""

    def __init__(self, parts: Sequence[Passage]) -> None:
        self.heading = parts[0].heading if parts[0].text else ""
        self.text = "\n".join((part.text or part.contents).strip() for part in parts)[:MOST_CHARS]
        self.starts = [0]

    @classmethod
    async def paged(cls, parts: Sequence[Passage], room: int, count: Callable[[str], int]) -> Document:
        """In pages of at most `room` tokens, as `count` counts them; other episodes go on meanwhile.

        No thread counts: tokenizers change while they encode.
        """
        document, budget = cls(parts), room
        for number, piece in enumerate(_PIECE.finditer(document.text), start=1):
            tokens = count(piece[0])
            if tokens > budget and piece.start() > document.starts[-1]:
                document.starts.append(piece.start())
                budget = room
            budget -= tokens
            if number % _AT_ONCE == 0:
                await asyncio.sleep(0)
        return document

    def page(self, number: int) -> str:
        """Page `number`, from 1, under its heading."""
        start, *ends = self.starts[number - 1 : number + 1]
        suffix = f" of {self.heading}" if self.heading else ""
        text = self.text[start : ends[0] if ends else None].strip()
        return f"page {number} of {len(self.starts)}{suffix}\n{text}"

    def excerpts(self, text: str) -> list[str]:
        """What stands around the first places where `text` is, in any case, each with its page."""
        matches = re.finditer(re.escape(text), self.text, re.IGNORECASE)
        spans: list[tuple[int, int]] = []  # of the matches; those close to each other are one
        for match in matches:
            if spans and match.start() - spans[-1][1] < _AROUND:
                spans[-1] = (spans[-1][0], match.end())
            elif len(spans) == _MOST_EXCERPTS:
                break
            else:
                spans.append(match.span())
        return [
            f"page {bisect_right(self.starts, start)}: {self._around(start, end)}" for start, end in spans
        ]

    def _around(self, start: int, end: int) -> str:
        """The text from `start` to `end` and some around it, in whole words, on one line."""
        before, after = self.text[max(0, start - _AROUND) : start], self.text[end : end + _AROUND]
        if len(before) < start:
            before = f"… {before.partition(' ')[2]}"
        if end + len(after) < len(self.text):
            after = f"{after.rpartition(' ')[0]} …"
        return " ".join(f"{before}{self.text[start:end]}{after}".split())


class Documents:
    """The documents behind a search tool; pages fit into observations of `max_obs_length` tokens."""

    def __init__(self, search: DocumentTool, count: Callable[[str], int], max_obs_length: int) -> None:
        self._search, self._count = search, count
        self._room = max(max_obs_length - _GLUE_TOKENS, max_obs_length // 2, 1)
        self._paged: dict[tuple[Passage, ...], Document] = {}

    async def of(self, name: str, searches: Sequence[Search]) -> tuple[Search, Document | None]:
        """The document with a passage of this id or address among what was shown; None where there is none.

        A name that was not shown is a mistake of the policy: the ids of a corpus may tell what is asked for.
        """
        for search in searches:
            for hit in search.shown_hits if search.tool == "search" else ():
                passage = hit.passage
                if name and name in (passage.id, passage.document, passage.url):
                    outcome = await self._search.document(passage, search.retriever)
                    parts = tuple(part.passage for part in outcome.hits)
                    return outcome, await self._document(parts) if outcome.status == "ok" else None
        error = f"no search has shown a document {name!r:.80}"
        return Search(name, status="rejected", error=error, attempts=0), None

    async def _document(self, parts: tuple[Passage, ...]) -> Document | None:
        """The document of these parts, one of the last that were asked for or made anew."""
        if parts and parts not in self._paged:
            document = await Document.paged(parts, self._room, self._count)
            if len(self._paged) >= _MOST_KEPT:
                del self._paged[next(iter(self._paged))]
            self._paged[parts] = document
        return self._paged.get(parts)


class OpenCall:
    """The tool `open`: a whole document, page by page."""

    name = "open"
    description = "Read a document that a search has shown, from its beginning, page by page."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "id": _ID,
            "page": {"type": "integer", "description": "Which page, if not the first."},
        },
        "required": ["id"],
    }

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search]) -> Search:
        name, page = arguments["id"].strip(), arguments.get("page", 1)
        outcome, document = await self._documents.of(name, seen)
        outcome = replace(outcome, query=f"{name} page {page}")
        if document is None:
            return outcome
        if not 1 <= page <= len(document.starts):
            error = f"no page {page}: the document has {len(document.starts)}"
            return replace(outcome, hits=(), status="rejected", error=error)
        return replace(outcome, hits=(_hit(name, document.page(page)),))


class FindCall:
    """The tool `find`: where a text stands in a document."""

    name = "find"
    description = "Find a word or phrase in a document that a search has shown."
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {
            "id": _ID,
            "text": {"type": "string", "description": "What to find, literally; case does not matter."},
        },
        "required": ["id", "text"],
    }

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    async def call(self, arguments: Mapping[str, Any], seen: Sequence[Search]) -> Search:
        name, text = arguments["id"].strip(), arguments["text"].strip()
        query = f"{name}: {text}"
        if not text or len(text) > _LONGEST_TEXT:
            error = f"the text is longer than {_LONGEST_TEXT} characters" if text else "the text is empty"
            return Search(query, status="rejected", error=error, attempts=0)
        outcome, document = await self._documents.of(name, seen)
        outcome = replace(outcome, query=query)
        if document is None:
            return outcome
        excerpts = tuple(_hit(name, excerpt) for excerpt in document.excerpts(text))
        return replace(outcome, hits=excerpts, status="ok" if excerpts else "empty")


def _hit(name: str, text: str) -> Hit:
    return Hit(Passage(name, text), 0.0)
