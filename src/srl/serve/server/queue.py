"""The queue of an index: queries that arrive while it is busy are searched as one batch, equal ones once.

A full queue raises a `Fault`, which `app.py` answers with 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from srl.index import Fault, Index
from srl.index.retriever import as_fault
from srl.process import DaemonThreads
from srl.serve.server.answers import AnswerCache, EncodedHits
from srl.trajectory import Hit

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0

Outcome = EncodedHits | Fault


@dataclass(slots=True, eq=False)
class Batch:
    """Queries that were searched together; times in seconds."""

    queries: list[str]
    k: int
    started: float = 0.0
    search_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of each query of a request.

    `cached` queries came from the cache.
    `queue_s`: seconds until the search of the last query began.
    """

    outcomes: list[Outcome]
    cached: int = 0
    queue_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Pending:
    """A query that is queued or, if it has a batch, being searched; nobody waits for it after `deadline`."""

    query: str
    k: int
    deadline: float
    done: asyncio.Future[Outcome]
    batch: Batch | None = None


class SearchQueue:
    """The queue of an index, with dynamic batching: the busier the index, the larger the batches.

    If a thread is idle, a query is searched with those that arrive in the same tick of the event loop.
    Queries that arrive while all threads are busy are the next batch. A batch has queries of one k, so that
    no answer depends on other requests; different ks take turns. A query that nobody waits for any more is
    not searched. Used by one event loop at a time.
    """

    def __init__(
        self,
        index: Index,
        *,
        threads: int = 1,
        max_batch: int = 256,
        max_waiting: int = 8192,
        timeout_s: float = 25.0,
        cache: AnswerCache | None = None,
        report: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self._index, self._digest = index, index.digest
        self._free, self._max_batch = threads, max_batch
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._cache = cache if cache is not None else AnswerCache(0)
        self._report = report
        self._pool = DaemonThreads(threads, "search")
        self._pending: dict[tuple[str, int], _Pending] = {}
        self._queued: dict[int, deque[_Pending]] = {}
        """Those without a batch by their k, whose turn comes in the order of this dict."""
        self._is_scheduled = False
        self.waiting = 0
        """Queries in the queue."""

    async def search(self, queries: Sequence[str], k: int) -> Answered:
        """The outcome of each query. Raises Fault if the queue is full or the search times out."""
        loop, arrived = asyncio.get_running_loop(), perf_counter()
        deadline = arrived + self._timeout_s
        outcomes: dict[str, Outcome] = {}
        waited_for: list[_Pending] = []
        new: list[_Pending] = []
        for query in dict.fromkeys(queries):
            if (hits := self._cache.get((self._digest, query, k))) is not None:
                outcomes[query] = hits
                continue
            if (pending := self._pending.get((query, k))) is None:
                pending = _Pending(query, k, deadline, loop.create_future())
                new.append(pending)
            pending.deadline = deadline
            waited_for.append(pending)
        cached = sum(query in outcomes for query in queries)
        if new:
            self._admit(loop, new, k)
        if waited_for:
            _, late = await asyncio.wait([each.done for each in waited_for], timeout=self._timeout_s)
            if late:
                raise Fault("timed_out", f"no answer within {self._timeout_s:g} s")
            outcomes |= {pending.query: pending.done.result() for pending in waited_for}
        batches = {pending.batch for pending in waited_for if pending.batch is not None}
        return Answered(
            [outcomes[query] for query in queries],
            cached,
            max((max(0.0, batch.started - arrived) for batch in batches), default=0.0),
        )

    def close(self) -> None:
        """End the threads, each after its batch."""
        self._pool.close()

    def _admit(self, loop: asyncio.AbstractEventLoop, new: list[_Pending], k: int) -> None:
        """Queue new queries. An empty queue accepts any request, so that a large one can be served."""
        if self.waiting and self.waiting + len(new) > self._max_waiting:
            why = f"{self.waiting:,} queries are already queued; try again later"
            raise Fault("refused", why, RETRY_AFTER_S)
        self._pending.update(((pending.query, k), pending) for pending in new)
        self._queued.setdefault(k, deque()).extend(new)
        self.waiting += len(new)
        if self._free and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._dispatch, loop)

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand queued queries to the idle threads."""
        self._is_scheduled = False
        while self._free and self._queued:
            if entries := self._next():
                batch = Batch([pending.query for pending in entries], entries[0].k)
                for pending in entries:
                    pending.batch = batch
                self._free -= 1
                self._pool.submit(partial(self._run, loop, batch, entries))

    def _next(self) -> list[_Pending]:
        """Queries of the next k that are waited for still: at most `max_batch`, or this thread's share."""
        k = next(iter(self._queued))
        queued = self._queued.pop(k)
        size = min(self._max_batch, -(-len(queued) // self._free))
        entries = [queued.popleft() for _ in range(size)]
        if queued:
            self._queued[k] = queued
        self.waiting -= size
        now = perf_counter()
        for pending in entries:
            if pending.deadline < now:
                del self._pending[pending.query, k]
        return [pending for pending in entries if pending.deadline >= now]

    def _run(self, loop: asyncio.AbstractEventLoop, batch: Batch, entries: list[_Pending]) -> None:
        """Search a batch and encode its hits; runs in a thread."""
        batch.started = perf_counter()
        try:
            outcomes = list(map(_encoded, self._index.outcomes(batch.queries, batch.k)))
            if len(outcomes) != len(entries):
                raise ValueError(f"{len(outcomes)} outcomes of {len(entries)} queries")
        except Exception as error:  # an index returns faults: this is a bug, which must not hang requests
            outcomes = [_encoded(as_fault(error))] * len(batch.queries)
        batch.search_s = perf_counter() - batch.started
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(self._settle, loop, batch, entries, outcomes)

    def _settle(
        self, loop: asyncio.AbstractEventLoop, batch: Batch, entries: list[_Pending], outcomes: list[Outcome]
    ) -> None:
        """Deliver the outcomes and start the next batch; runs in the event loop."""
        self._free += 1
        for pending, outcome in zip(entries, outcomes, strict=True):
            del self._pending[pending.query, pending.k]
            if isinstance(outcome, EncodedHits):
                self._cache.put((self._digest, pending.query, pending.k), outcome)
            pending.done.set_result(outcome)
        self._dispatch(loop)
        self._report(batch)


def _encoded(outcome: list[Hit] | Fault) -> Outcome:
    """The hits of a query as JSON. A retriever may return anything."""
    if not isinstance(outcome, Fault):
        try:
            return EncodedHits.of(outcome)
        except Exception as error:
            outcome = as_fault(error)
    if outcome.__cause__ is not None:
        log.warning("a search failed", exc_info=outcome.__cause__)
    return outcome
