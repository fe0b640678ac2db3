"""Requests that wait while the index is busy are searched together, in one thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from srl.serve.local import Searchable
from srl.trajectory import Hit


@dataclass(slots=True)
class _Waiting:
    queries: list[str]
    topk: int
    answer: asyncio.Future[list[list[Hit]]]


class SearchQueue:
    """The line in front of an index; the busier it is, the larger its batches.

    Requests are searched together only when they ask for the same k, so no answer depends on what
    else is asked at the time.
    """

    def __init__(self, index: Searchable, max_batch: int = 1024) -> None:
        self._index = index
        self._max_batch = max_batch
        self._line: list[_Waiting] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    async def search(self, queries: list[str], topk: int) -> list[list[Hit]]:
        """The hits of each query. Raises what the retriever raises."""
        waiting = _Waiting(queries, topk, asyncio.get_running_loop().create_future())
        self._line.append(waiting)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await waiting.answer

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        while self._line:
            batch = self._next()
            try:
                await self._settle(batch)
            except Exception as error:
                if len(batch) == 1:
                    _fail(batch[0], error)
                    continue
                for waiting in batch:
                    await self._alone(waiting)

    def _next(self) -> list[_Waiting]:
        """The first in line, and those behind it with the same k as far as they fit."""
        batch: list[_Waiting] = []
        rest: list[_Waiting] = []
        size = 0
        for waiting in self._line:
            fits = not batch or (
                waiting.topk == batch[0].topk and size + len(waiting.queries) <= self._max_batch
            )
            (batch if fits else rest).append(waiting)
            size += len(waiting.queries) if fits else 0
        self._line = rest
        return batch

    async def _alone(self, waiting: _Waiting) -> None:
        try:
            await self._settle([waiting])
        except Exception as error:
            _fail(waiting, error)

    async def _settle(self, batch: list[_Waiting]) -> None:
        queries = [query for waiting in batch for query in waiting.queries]
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._index.search, queries, batch[0].topk)
        if len(found) != len(queries):
            raise ValueError(f"the retriever gave {len(found)} answers to {len(queries)} queries")
        answers = iter(found)
        for waiting in batch:
            mine = [next(answers) for _ in waiting.queries]
            if not waiting.answer.done():
                waiting.answer.set_result(mine)


def _fail(waiting: _Waiting, error: Exception) -> None:
    if not waiting.answer.done():
        waiting.answer.set_exception(error)
