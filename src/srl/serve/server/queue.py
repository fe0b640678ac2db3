"""The queue of an index: queries that arrive while it is busy are searched as one batch, equal ones once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter

from srl.index import Fault, Index, timing
from srl.process import DaemonThreads
from srl.serve.server.answer_cache import AnswerCache, EncodedHits, encode
from srl.trajectory import Hit

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0


@dataclass(slots=True, eq=False)
class Batch:
    """Queries that were searched together; times in seconds."""

    queries: list[str]
    k: int
    started: float = 0.0
    embed_s: float = 0.0
    search_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """The outcome of each query of a request; times in seconds are those of its slowest batch.

    `cached` queries came from the cache; `shared` ones had just been asked, by another request or this one.
    """

    outcomes: list[EncodedHits | Fault]
    cached: int = 0
    shared: int = 0
    queue_s: float = 0.0
    embed_s: float = 0.0
    search_s: float = 0.0


@dataclass(slots=True, eq=False)
class _WaitingRequest:
    """A request that waits for the outcomes of `left` more queries."""

    done: asyncio.Future[None]
    left: int


@dataclass(slots=True, eq=False)
class _PendingQuery:
    """A query that is queued or, if it has a batch, being searched; and the requests waiting for it."""

    query: str
    k: int
    waiting: list[_WaitingRequest] = field(default_factory=list)
    batch: Batch | None = None
    outcome: EncodedHits | Fault | None = None


class SearchQueue:
    """The queue of an index, with dynamic batching: the busier the index, the larger the batches.

    If a thread is idle, a query is searched with those that arrive in the same tick of the event loop, or
    within `batch_wait_s`. Queries that arrive while all threads are busy are the next batch. A batch has
    queries of one k, so that no answer depends on other requests; different ks take turns. Used by one
    event loop at a time; a later loop may use it again.
    """

    def __init__(
        self,
        index: Index,
        *,
        threads: int = 1,
        max_batch: int = 256,
        batch_wait_s: float = 0.0,
        max_waiting: int = 8192,
        timeout_s: float = 25.0,
        cache: AnswerCache | None = None,
        report: Callable[[Batch], None] | None = None,
    ) -> None:
        self._index, self._digest = index, index.digest
        self._threads, self._max_batch, self._batch_wait_s = threads, max_batch, batch_wait_s
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._cache = cache if cache is not None else AnswerCache(0)
        self._report = report
        self._pool: DaemonThreads | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begin(None)

    def _begin(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Start with an empty queue; waiting requests ended with the previous loop."""
        self._loop = loop
        self._free = self._threads
        self._scheduled = False
        self.waiting = 0
        self._queued: dict[int, dict[str, _PendingQuery]] = {}
        self._searching: dict[tuple[str, int], _PendingQuery] = {}

    async def search(self, queries: Sequence[str], k: int) -> Answered:
        """The outcome of each query. Raises Fault if the queue is full or the search times out."""
        loop, arrived = asyncio.get_running_loop(), perf_counter()
        if loop is not self._loop:
            self._begin(loop)
        found, wanted, new = self._look_up(queries, k)
        if wanted:
            self._admit(new, k)
            await self._wait(loop, wanted.values())
        return _answered(queries, found, wanted, len(new), arrived)

    def close(self) -> None:
        """End the threads; the next search starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _look_up(
        self, queries: Sequence[str], k: int
    ) -> tuple[dict[str, EncodedHits], dict[str, _PendingQuery], list[_PendingQuery]]:
        """Cached answers; queries to wait for; and those of them that were not asked yet."""
        found: dict[str, EncodedHits] = {}
        wanted: dict[str, _PendingQuery] = {}
        new: list[_PendingQuery] = []
        queued = self._queued.get(k, {})
        for query in dict.fromkeys(queries) if len(queries) > 1 else queries:
            kept = self._cache.get((self._digest, query, k))
            if kept is not None:
                found[query] = kept
                continue
            entry = queued.get(query) or self._searching.get((query, k))
            if entry is None:
                entry = _PendingQuery(query, k)
                new.append(entry)
            wanted[query] = entry
        return found, wanted, new

    def _admit(self, new: list[_PendingQuery], k: int) -> None:
        """Queue the new queries. An empty queue accepts any request, so that a large one can be served."""
        if not new:
            return
        if self.waiting and self.waiting + len(new) > self._max_waiting:
            raise Fault(
                "refused", f"{self.waiting:,} queries are already queued; try again later", RETRY_AFTER_S
            )
        self._queued.setdefault(k, {}).update((entry.query, entry) for entry in new)
        self.waiting += len(new)
        if self._free and not self._scheduled:
            self._schedule()

    def _schedule(self) -> None:
        assert self._loop is not None
        self._scheduled = True
        if self._batch_wait_s:
            self._loop.call_later(self._batch_wait_s, self._dispatch, self._loop)
        else:
            self._loop.call_soon(self._dispatch, self._loop)

    async def _wait(self, loop: asyncio.AbstractEventLoop, wanted: Collection[_PendingQuery]) -> None:
        request = _WaitingRequest(loop.create_future(), len(wanted))
        for entry in wanted:
            entry.waiting.append(request)
        try:
            async with asyncio.timeout(self._timeout_s):
                await request.done
        except TimeoutError:
            raise Fault("timed_out", f"no answer within {self._timeout_s:g} s") from None
        finally:
            if request.left:
                self._leave(request, wanted)

    def _leave(self, request: _WaitingRequest, wanted: Collection[_PendingQuery]) -> None:
        """Remove queued queries that no other request waits for."""
        for entry in wanted:
            if entry.batch is None:
                entry.waiting.remove(request)
                queued = self._queued.get(entry.k, {})
                if not entry.waiting and entry.query in queued:
                    del queued[entry.query]
                    self.waiting -= 1
                    if not queued:
                        del self._queued[entry.k]

    def _dispatch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand queued queries to the idle threads."""
        if loop is not self._loop:
            return
        self._scheduled = False
        while self._free and self._queued:
            entries = self._next()
            batch = Batch([entry.query for entry in entries], entries[0].k)
            for entry in entries:
                entry.batch = batch
                self._searching[entry.query, entry.k] = entry
            self.waiting -= len(entries)
            self._free -= 1
            if self._pool is None:
                self._pool = DaemonThreads(self._threads, "search")
            self._pool.submit(partial(self._run, loop, batch, entries))

    def _next(self) -> list[_PendingQuery]:
        """The next batch: the first queries of the next k, at most `max_batch` or this thread's share."""
        k, queued = next(iter(self._queued.items()))
        size = min(self._max_batch, -(-len(queued) // self._free))
        entries = list(islice(queued.values(), size))
        del self._queued[k]
        if len(entries) < len(queued):
            for entry in entries:
                del queued[entry.query]
            self._queued[k] = queued
        return entries

    def _run(self, loop: asyncio.AbstractEventLoop, batch: Batch, entries: list[_PendingQuery]) -> None:
        """Search a batch and encode its hits; runs in a thread."""
        outcomes = self._outcomes(batch)
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(self._settle, loop, batch, entries, outcomes)

    def _outcomes(self, batch: Batch) -> list[EncodedHits | Fault]:
        batch.started = perf_counter()
        try:
            with timing.collect_timings() as seconds:
                outcomes = self._index.outcomes(batch.queries, batch.k)
            batch.embed_s = seconds.get("embed", 0.0)
            batch.search_s = perf_counter() - batch.started - batch.embed_s
            if len(outcomes) != len(batch.queries):
                raise ValueError(
                    f"the retriever returned {len(outcomes)} answers for {len(batch.queries)} queries"
                )
        except Exception as error:  # a retriever may raise anything
            log.exception("a search failed")
            fault = Fault("failed", f"{type(error).__name__}: {error}".partition("\n")[0])
            return [fault] * len(batch.queries)
        _log_first(outcomes)
        return [_encoded(outcome) for outcome in outcomes]

    def _settle(
        self,
        loop: asyncio.AbstractEventLoop,
        batch: Batch,
        entries: list[_PendingQuery],
        outcomes: list[EncodedHits | Fault],
    ) -> None:
        """Deliver the outcomes and start the next batch; runs in the event loop."""
        if loop is not self._loop:
            return
        self._free += 1
        for entry, outcome in zip(entries, outcomes, strict=True):
            entry.outcome = outcome
            del self._searching[entry.query, entry.k]
            if isinstance(outcome, EncodedHits):
                self._cache.put((self._digest, entry.query, entry.k), outcome)
            for request in entry.waiting:
                request.left -= 1
                if not request.left and not request.done.done():
                    request.done.set_result(None)
        self._dispatch(loop)
        if self._report is not None:
            self._report(batch)


def _answered(
    queries: Sequence[str],
    found: dict[str, EncodedHits],
    wanted: dict[str, _PendingQuery],
    new: int,
    arrived: float,
) -> Answered:
    outcomes = [found[query] if query in found else _outcome(wanted[query]) for query in queries]
    cached = len(queries) if not wanted else sum(query in found for query in queries)
    batches = {entry.batch for entry in wanted.values() if entry.batch is not None}
    return Answered(
        outcomes,
        cached,
        len(queries) - cached - new,
        max((max(0.0, batch.started - arrived) for batch in batches), default=0.0),
        max((batch.embed_s for batch in batches), default=0.0),
        max((batch.search_s for batch in batches), default=0.0),
    )


def _outcome(entry: _PendingQuery) -> EncodedHits | Fault:
    assert entry.outcome is not None, "a request waits until all its queries have an outcome"
    return entry.outcome


def _log_first(outcomes: Sequence[Sequence[Hit] | Fault]) -> None:
    """Log the first unexpected exception of a batch, with its traceback."""
    causes = (one.__cause__ for one in outcomes if isinstance(one, Fault) and one.__cause__)
    if cause := next(causes, None):
        log.warning("a search failed", exc_info=cause)


def _encoded(outcome: Sequence[Hit] | Fault) -> EncodedHits | Fault:
    if isinstance(outcome, Fault):
        return outcome
    try:
        return encode(outcome)
    except ValueError as error:
        return Fault("failed", str(error))
    except Exception as error:  # a retriever may return anything
        log.exception("the hits of a search cannot be written")
        why = f"the retriever returned no hits that can be written ({type(error).__name__}: {error})"
        return Fault("failed", why.partition("\n")[0])
