"""Batches the queries of one tick of the event loop; rejects empty and overlong ones."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from time import perf_counter

from srl.trajectory import Search

MAX_QUERY_CHARS = 1000

Answer = Callable[[list[str]], Awaitable[list[Search]]]
"""Answers a batch of distinct queries with one outcome each."""


def clean(query: str) -> str:
    """The query as it is sent: stripped, with lone surrogates (invalid in UTF-8) replaced."""
    return query.strip().encode("utf-8", "replace").decode()


def rejection(query: str, max_chars: int) -> str:
    """Why a query is rejected; empty if it is valid."""
    if not query:
        return "the query is empty"
    if len(query) > max_chars:
        return f"the query has {len(query):,} characters; at most {max_chars:,} are allowed"
    return ""


class QueryBatcher:
    """Collects the queries of one tick of the event loop and answers them in one call.

    Equal queries are asked once. A batch is in the order of arrival, so the same episodes make the same
    calls. Used by one event loop at a time; a later loop may use it again.
    """

    def __init__(self, answer: Answer, max_batch: int, max_query_chars: int) -> None:
        self._answer = answer
        self._max_batch, self._max_query_chars = max_batch, max_query_chars
        self._waiting: dict[str, asyncio.Future[Search]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[asyncio.Task[None]] = set()

    async def search(self, query: str, index_digest: str) -> Search:
        """The outcome of one query, with its latency; empty and overlong queries are `rejected` at once."""
        start, cleaned = perf_counter(), clean(query)
        if error := rejection(cleaned, self._max_query_chars):
            return Search(query, status="rejected", error=error, attempts=0, index_digest=index_digest)
        outcome = await self._ask(cleaned)
        return replace(outcome, query=query, latency_s=perf_counter() - start)

    async def _ask(self, query: str) -> Search:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting = loop, {}
        if not self._waiting:
            loop.call_soon(self._flush)
        future = self._waiting.setdefault(query, loop.create_future())
        return await asyncio.shield(future)

    def _flush(self) -> None:
        waiting, self._waiting = list(self._waiting.items()), {}
        for start in range(0, len(waiting), self._max_batch):
            task = asyncio.ensure_future(self._settle(waiting[start : start + self._max_batch]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _settle(self, batch: list[tuple[str, asyncio.Future[Search]]]) -> None:
        try:
            answers = await self._answer([query for query, _ in batch])
            settled = [(future, answer) for (_, future), answer in zip(batch, answers, strict=True)]
        except Exception as error:  # a bug: raise it in the waiting tasks, which would hang otherwise
            for _, future in batch:
                future.set_exception(error)
            return
        for future, answer in settled:
            future.set_result(answer)
