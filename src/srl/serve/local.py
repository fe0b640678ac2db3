"""Search in process: the queries of all episodes that ask in one tick are one call of the index."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter
from typing import Protocol

from srl.serve.batching import MAX_QUERY_CHARS, TickBatcher, clean, rejection
from srl.trajectory import Hit, Search, SearchStatus


class Searchable(Protocol):
    """What an index is to search: `srl.index.Index`, or anything like it."""

    @property
    def digest(self) -> str: ...

    def search(self, queries: list[str], k: int) -> list[list[Hit]]: ...


class LocalSearch:
    """Answers episodes from an open index. No thread and no network, so results repeat exactly."""

    def __init__(
        self,
        index: Searchable,
        topk: int = 3,
        *,
        max_query_chars: int = MAX_QUERY_CHARS,
        max_batch: int = 4096,
    ) -> None:
        self._index = index
        self._topk = topk
        self._max_query_chars = max_query_chars
        self._batcher = TickBatcher(self._answer, max_batch)

    @property
    def index_digest(self) -> str:
        return self._index.digest

    async def search(self, query: str) -> Search:
        """The outcome of one query; never an exception.

        Empty and overlong queries are `rejected`, an index that raises makes the search `failed`.
        """
        start, asked = perf_counter(), clean(query)
        if error := rejection(asked, self._max_query_chars):
            return Search(query, status="rejected", error=error, attempts=0, index_digest=self.index_digest)
        found = await self._batcher.ask(asked)
        return replace(found, query=query, latency_s=perf_counter() - start)

    async def _answer(self, queries: list[str]) -> list[Search]:
        try:
            answers = self._index.search(queries, self._topk)
            return [self._found(query, hits) for query, hits in zip(queries, answers, strict=True)]
        except Exception as error:  # a retriever may raise anything; only the query at fault pays for it
            if len(queries) > 1:
                return [(await self._answer([query]))[0] for query in queries]
            message = f"{type(error).__name__}: {error}".partition("\n")[0]
            return [Search(queries[0], status="failed", error=message, index_digest=self.index_digest)]

    def _found(self, query: str, hits: list[Hit]) -> Search:
        status: SearchStatus = "ok" if hits else "empty"
        return Search(query, tuple(hits), status, index_digest=self.index_digest)

    async def aclose(self) -> None:
        """Nothing to close; as `HttpSearch.aclose`."""
