"""Search over HTTP: one request for the queries of a tick, time-outs, retries, typed outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from hashlib import blake2b
from time import monotonic, perf_counter

import httpx

from srl.serve.client.failover import Server, Servers
from srl.serve.client.preflight import agreed, look_at, other_index
from srl.serve.client.request import (
    RequestFault,
    connections,
    health_url,
    post,
    retrieve_url,
    shown,
    token,
)
from srl.serve.tick_batcher import MAX_QUERY_CHARS, TickBatcher, clean, rejection
from srl.serve.wire import write_request
from srl.trajectory import Hit, Search

log = logging.getLogger(__name__)

MAX_WAIT_S = 10.0
"""The longest that a retry waits, whatever the server asks for."""

_ALONE_AT_ONCE = 8
_PROBE_S = 5.0


class HttpSearch:
    """Answers episodes from a search server, or from several that serve one index.

    Queries that arrive in one tick are one request (of at most `max_batch`). A request that fails goes
    to the other healthy servers at once; when all have failed they are tried again after `backoff_s`,
    twice that, and so on, `retries` times. When a batch still has no answer its queries are asked one
    by one, so that one bad query fails alone. A server that keeps failing is left alone for a while; while
    all are, a search waits for the end of that instead of asking, which is one of its retries too.

    All answers must come from one index: the one whose digest begins with `digest`, or the first that a
    server names.
    The environment variable SRL_SEARCH_TOKEN holds the bearer token, where the servers want one.
    Raises UserError for what is no URL and no token.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        topk: int = 3,
        *,
        digest: str = "",
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.2,
        max_query_chars: int = MAX_QUERY_CHARS,
        max_batch: int = 128,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.urls = [retrieve_url(one) for one in ([url] if isinstance(url, str) else url)]
        self._topk, self._timeout_s = topk, timeout_s
        self._retries, self._backoff_s = retries, backoff_s
        self._max_query_chars = max_query_chars
        self._transport, self._sleep = transport, sleep
        self._token = token()
        self._digest = digest
        self._batcher = TickBatcher(self._answer, max_batch)
        self._servers = Servers(self.urls, self._is_back, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: httpx.AsyncClient | None = None

    @property
    def index_digest(self) -> str:
        """The digest of the index that answers; empty before it is known, and where servers name none."""
        return self._digest

    async def connect(self) -> str:
        """The index digest of the servers, which every answer must have from now on.

        Raises UserError, naming the servers at fault, where one does not answer searches, where they have
        different indexes, and where the index is not the one that this client was made for.
        """
        looked = await look_at(self._client(), self.urls, self._topk, self._timeout_s)
        self._digest = agreed(looked, self._digest)
        return self._digest

    async def search(self, query: str) -> Search:
        """The outcome of one query; never an exception.

        `timed_out`, `refused` and `failed` are faults of the infrastructure; an empty or overlong
        query is `rejected` without being sent.
        """
        start, asked = perf_counter(), clean(query)
        if error := rejection(asked, self._max_query_chars):
            return Search(query, status="rejected", error=error, attempts=0, index_digest=self._digest)
        found = await self._batcher.ask(asked)
        return replace(found, query=query, latency_s=perf_counter() - start)

    async def aclose(self) -> None:
        """Close the connections; another search opens new ones."""
        self._servers.stop()
        if self._opened is not None and self._loop is asyncio.get_running_loop():
            await self._opened.aclose()
        self._opened = None

    async def _answer(self, queries: list[str]) -> list[Search]:
        found, fault = await self._ask(queries, self._retries + 1)
        if len(queries) == 1 or fault is None or not fault.one_by_one:
            return found
        limit = asyncio.Semaphore(_ALONE_AT_ONCE)

        async def alone(query: str) -> Search:
            async with limit:
                (one,), _ = await self._ask([query], 1)
                return replace(one, attempts=one.attempts + found[0].attempts)

        return await asyncio.gather(*map(alone, queries))

    async def _ask(self, queries: list[str], rounds: int) -> tuple[list[Search], RequestFault | None]:
        """One outcome for each query; all have the same fault, returned too, when no round succeeds."""
        sent, faults = 0, list[RequestFault]()
        for number in range(rounds):
            if number:
                await self._sleep(self.wait_s(queries, number, faults))
            answer, faults = await self._round(queries)
            sent += sum(fault.was_sent for fault in faults)
            if answer is not None:
                return self._found(queries, sent + 1, *answer), None
            if not any(fault.again for fault in faults):
                break
        return self._lost(queries, sent, faults[-1]), faults[-1]

    async def _round(
        self, queries: list[str]
    ) -> tuple[tuple[list[list[Hit]], str] | None, list[RequestFault]]:
        """Ask one healthy server after the other: the first answer, and the faults before it."""
        faults: dict[Server, RequestFault] = {}
        while (server := self._servers.pick(faults)) is not None:
            try:
                return await self._post(server, queries), list(faults.values())
            except RequestFault as fault:
                log.debug("no answer to a search: %s", fault)
                faults[server] = fault
                if not fault.elsewhere:
                    break
        return None, list(faults.values()) or [self._servers.refusal()]

    def _found(self, queries: list[str], sent: int, answers: list[list[Hit]], digest: str) -> list[Search]:
        return [
            Search(query, tuple(hits), "ok" if hits else "empty", 0.0, sent, "", digest)
            for query, hits in zip(queries, answers, strict=True)
        ]

    def _lost(self, queries: list[str], sent: int, fault: RequestFault) -> list[Search]:
        why = str(fault)
        return [Search(query, (), fault.status, 0.0, sent, why, self._digest) for query in queries]

    def wait_s(self, queries: Sequence[str], number: int, faults: Sequence[RequestFault]) -> float:
        """Seconds before round `number` (from 1): the back-off, and what the servers ask for, within limits.

        Where all of them rest it is the end of the first rest, and the back-off. Half of the back-off is
        jitter, so that clients do not return all at once. It follows from the queries alone: a run that
        repeats waits the same.
        """
        key = blake2b("\0".join([str(number), *queries]).encode(), digest_size=4).digest()
        jitter = int.from_bytes(key) / 2**32
        backoff = min(self._backoff_s * 2 ** (number - 1), MAX_WAIT_S) * (0.5 + jitter / 2)
        asked = min(fault.retry_after_s or 0.0 for fault in faults if fault.again)
        return min(max(asked, self._servers.rest_s), MAX_WAIT_S) + backoff

    async def _post(self, server: Server, queries: list[str]) -> tuple[list[list[Hit]], str]:
        """The hits of each query and the digest of the index. Raises RequestFault."""
        body = write_request(queries, self._topk)
        with self._servers.asking(server, hash(body)):
            client = self._client()
            hits, digest = await post(client, server.url, body, len(queries), self._topk, self._timeout_s)
            self._check_digest(server.url, digest)
        return hits, digest

    def _check_digest(self, url: str, digest: str) -> None:
        if self._is_other(digest):
            raise RequestFault("failed", other_index(shown(url), digest, self._digest), "setup")
        self._digest = digest or self._digest

    def _is_other(self, digest: str) -> bool:
        return bool(digest) and not digest.startswith(self._digest)

    async def _is_back(self, server: Server) -> bool:
        """Whether a server that failed answers anything again."""
        try:
            response = await self._client().get(
                health_url(server.url), timeout=min(self._timeout_s, _PROBE_S)
            )
        except Exception as error:  # as in _health
            log.debug("%s is not back: %s", shown(server.url), error)
            return False
        return response.status_code < 500

    def _client(self) -> httpx.AsyncClient:
        """The connections of the running event loop; those of an earlier loop died with it."""
        loop = asyncio.get_running_loop()
        if self._opened is None or self._loop is not loop:
            self._loop = loop
            self._opened = connections(self.urls, self._token, self._transport)
        return self._opened
