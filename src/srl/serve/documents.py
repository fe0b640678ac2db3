"""The passages of a whole document: a passage alone, or the parts `ID#1`, `ID#2`, … of a long one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import takewhile

from srl.trajectory import Hit, Passage, Search

DOCUMENT = "document"
"""`Search.tool` of what `document` of a search tool returns."""
MOST_PARTS = 1024
_AT_ONCE = 64


async def passages_of(
    passage: Passage, look_up: Callable[[list[str]], Awaitable[list[Passage | None]]]
) -> list[Hit]:
    """The document of `passage` in order, as hits; `look_up` finds passages by their names."""
    if passage.document == passage.id:
        pages = await look_up(list(dict.fromkeys(name for name in (passage.id, passage.url) if name)))
        return [Hit(page, 0.0) for page in pages if page][:1]
    parts: list[Passage] = []
    for start in range(1, MOST_PARTS, _AT_ONCE):
        names = [f"{passage.document}#{number}" for number in range(start, start + _AT_ONCE)]
        there = [page for page in takewhile(bool, await look_up(names)) if page]
        parts += there
        if len(there) < len(names):
            break
    return [Hit(part, 0.0) for part in parts]


def as_document(outcome: Search, passage: Passage, index_digest: str) -> Search:
    """The outcome of asking for the document of `passage`."""
    digest = outcome.index_digest or index_digest
    return replace(outcome, query=passage.id, index_digest=digest, tool=DOCUMENT)
