"""Several retrievers in one run: the default one, and others that the policy calls by name."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from srl.protocol import unknown_retriever
from srl.trajectory import DocumentTool, Passage, Search, SearchTool


class NamedRetrievers:
    """A search tool that sends each query to the retriever it names, or else to the default one.

    A search that names an unknown retriever is `rejected`: the policy made the mistake, and is told so.
    """

    def __init__(self, default: SearchTool, retrievers: Mapping[str, SearchTool]) -> None:
        self._tools: dict[str, Any] = {"": default, **retrievers}
        self.retrievers: tuple[str, ...] = tuple(retrievers)

    @property
    def index_digest(self) -> str:
        """The digest of the default retriever's index."""
        return self.digests[""]

    @property
    def digests(self) -> dict[str, str]:
        """The index digest of each retriever by its name, "" for the default one; empty if not known."""
        return {name: digest_of(tool) for name, tool in self._tools.items()}

    async def search(self, query: str, retriever: str = "") -> Search:
        """The outcome of one query; never raises."""
        if retriever not in self._tools:
            error = unknown_retriever(retriever, self.retrievers)
            return Search(query, status="rejected", error=error, attempts=0, retriever=retriever)
        return replace(await self._tools[retriever].search(query), retriever=retriever)

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The document of a passage that `retriever` returned; never raises."""
        return replace(await self._tools[retriever].document(passage), retriever=retriever)

    async def lacks_documents(self) -> str:
        """Why a retriever has none, with its name."""
        for name, tool in self._tools.items():
            if why := await lacks_documents(tool):
                return f"{name}: {why}" if name else why
        return ""

    async def connect(self) -> None:
        """Connect to the servers of all retrievers. Raises UserError if one does not answer."""
        await asyncio.gather(*map(connect, self._tools.values()))

    async def aclose(self) -> None:
        """Close the connections of all retrievers."""
        await asyncio.gather(*map(aclose, self._tools.values()))


def digest_of(search: object) -> str:
    """The index digest of a search tool; empty if it has or knows none."""
    return str(getattr(search, "index_digest", ""))


async def lacks_documents(search: object) -> str:
    """Why a search tool has no documents; empty if it has."""
    return await search.lacks_documents() if isinstance(search, DocumentTool) else "it has no documents"


async def connect(search: object) -> None:
    """Connect a search tool to its servers, if it has some. Raises UserError if one does not answer."""
    if (method := getattr(search, "connect", None)) is not None:
        await method()


async def aclose(search: object) -> None:
    """Close the connections of a search tool, if it has some."""
    if (method := getattr(search, "aclose", None)) is not None:
        await method()
