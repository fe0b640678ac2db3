"""Several searchers in one run: the default one, and others that the policy asks by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from srl.protocol import unknown_retriever
from srl.trajectory import Search, SearchTool


class NamedRetrievers:
    """Sends each query to the retriever that it names; a query that names none goes to the default.

    A name that is none of `retrievers` makes the search `rejected`: that is the policy's own mistake, of
    which it is told.
    """

    def __init__(self, default: SearchTool, retrievers: Mapping[str, SearchTool]) -> None:
        self._searchers = {"": default, **retrievers}
        self.retrievers: tuple[str, ...] = tuple(retrievers)

    @property
    def index_digest(self) -> str:
        """The digest of the default retriever's index."""
        return self.digests[""]

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each retriever's index by its name, "" for the default; empty where not known."""
        return {name: digest_of(searcher) for name, searcher in self._searchers.items()}

    async def search(self, query: str, retriever: str = "") -> Search:
        """The outcome of one query; never an exception."""
        if retriever not in self._searchers:
            error = unknown_retriever(retriever, self.retrievers)
            return Search(query, status="rejected", error=error, attempts=0, retriever=retriever)
        return replace(await self._searchers[retriever].search(query), retriever=retriever)

    async def connect(self) -> None:
        """Reach every retriever that is elsewhere. Raises UserError where one does not answer."""
        await asyncio.gather(*map(connect, self._searchers.values()))

    async def aclose(self) -> None:
        """Close the connections of every retriever."""
        await asyncio.gather(*map(aclose, self._searchers.values()))


def digest_of(search: object) -> str:
    """The digest of the index behind a searcher; empty where it is not known, or nothing is searched."""
    return str(getattr(search, "index_digest", ""))


async def connect(search: object) -> None:
    """Reach what a searcher needs to reach, where it needs to. Raises UserError where nobody answers."""
    if (reach := getattr(search, "connect", None)) is not None:
        await reach()


async def aclose(search: object) -> None:
    """Close a searcher, where there is something to close."""
    if (close := getattr(search, "aclose", None)) is not None:
        await close()
