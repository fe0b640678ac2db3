"""Search in process: the queries of all episodes in one tick are one call to the index."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from srl.index import Index
from srl.index.retriever import Fault, as_retriever, outcomes_of
from srl.process import in_thread
from srl.serve.documents import as_document, passages_of
from srl.serve.query_batcher import MAX_QUERY_CHARS, QueryBatcher
from srl.trajectory import Hit, Passage, Search, SearchStatus

MAX_BATCH = 4096
LIVE_AT_ONCE = 16
"""Queries in flight to a live index."""


class LocalSearch:
    """A search tool that searches an open index.

    Uses no thread and no network, so results repeat exactly. A live index is the exception: each query runs
    in a thread of its own, so that a slow one delays only its own episode.
    """

    def __init__(
        self,
        index: Index,
        topk: int = 3,
    ) -> None:
        self._index, self._retriever = index, as_retriever(index)
        self._topk = topk
        self._live = self._retriever.live
        self._batcher = QueryBatcher(self._answer, 1 if self._live else MAX_BATCH, MAX_QUERY_CHARS)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Semaphore(LIVE_AT_ONCE)

    @property
    def index_digest(self) -> str:
        return self._index.digest

    async def search(self, query: str) -> Search:
        """The outcome of one query; never raises.

        Empty and overlong queries are `rejected`; if the index raises, the search has `failed`.
        """
        return await self._batcher.search(query, self.index_digest)

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The passages of the document of `passage`, in order; never raises."""

        async def look_up(names: list[str]) -> list[Passage | None]:
            return [self._passage(name) for name in names]

        try:
            outcome = self._outcome(passage.id, await passages_of(passage, look_up))
        except Exception as error:  # as of a search: an episode must get an outcome
            outcome = self._outcome(passage.id, Fault("failed", f"{type(error).__name__}: {error}"))
        return as_document(outcome, passage, self.index_digest)

    def _passage(self, name: str) -> Passage | None:
        with suppress(KeyError):
            return self._index.passage(name)
        return None

    async def lacks_documents(self) -> str:
        return "a live retriever has no documents" if self._live else ""

    async def _answer(self, queries: list[str]) -> list[Search]:
        outcomes = await self._ask_live(queries) if self._live else self._outcomes(queries)
        return [self._outcome(query, outcome) for query, outcome in zip(queries, outcomes, strict=True)]

    async def _ask_live(self, queries: list[str]) -> list[list[Hit] | Fault]:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._room = loop, asyncio.Semaphore(LIVE_AT_ONCE)
        async with self._room:
            return await in_thread(lambda: self._outcomes(queries))

    def _outcomes(self, queries: list[str]) -> list[list[Hit] | Fault]:
        return outcomes_of(self._retriever, queries, self._topk)

    def _outcome(self, query: str, outcome: list[Hit] | Fault) -> Search:
        if isinstance(outcome, Fault):
            why = " ".join(str(outcome).split())
            return Search(query, status=outcome.status, error=why, index_digest=self.index_digest)
        status: SearchStatus = "ok" if outcome else "empty"
        return Search(query, tuple(outcome), status, index_digest=self.index_digest)
