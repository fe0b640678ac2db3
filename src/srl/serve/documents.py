"""The passages of a whole document: a passage alone, or the parts `ID#1`, `ID#2`, … of a long one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile

from srl.trajectory import Hit, Passage, Search

DOCUMENT = "document"
"""`Search.tool` of what `document` of a search tool returns."""
MOST_PARTS = 1024
_AT_ONCE = 64


def names_of(passage: Passage) -> Iterator[list[str]]:
    """The names by which the passages of the document are asked for, some at a time."""
    if passage.document == passage.id:
        yield list(dict.fromkeys(name for name in (passage.id, passage.url) if name))
        return
    for start in range(1, MOST_PARTS, _AT_ONCE):
        yield [f"{passage.document}#{number}" for number in range(start, start + _AT_ONCE)]


def parts_in(passage: Passage, pages: Sequence[Passage | None]) -> list[Passage]:
    """Those of the passages with some of the names that belong to the document: all up to a missing one."""
    if passage.document == passage.id:
        return [page for page in pages if page][:1]
    return [page for page in takewhile(bool, pages) if page]


def as_document(outcome: Search, passage: Passage, index_digest: str) -> Search:
    """The outcome of asking for the document of `passage`."""
    digest = outcome.index_digest or index_digest
    return Search(
        passage.id, outcome.hits, outcome.status, outcome.latency_s, outcome.attempts, outcome.error, digest,
        tool=DOCUMENT,
    )  # fmt: skip


def hits_of(parts: Sequence[Passage]) -> list[Hit]:
    return [Hit(part, 0.0) for part in parts]
