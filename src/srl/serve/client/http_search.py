"""Search over HTTP: one request for the queries of a tick, with time-outs, retries and failover."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import monotonic
from typing import NamedTuple

import httpx

from srl.serve.client.failover import Server, Servers
from srl.serve.client.preflight import agreed_digest, ask_servers, wrong_index
from srl.serve.client.request import (
    RequestFault,
    bearer_token,
    health_url,
    new_client,
    post,
    retrieve_url,
    without_secrets,
)
from srl.serve.client.retry import MAX_WAIT_S, backoff, repeatable_jitter, retried
from srl.serve.query_batcher import MAX_QUERY_CHARS, QueryBatcher
from srl.serve.wire import write_request
from srl.trajectory import Hit, Search

log = logging.getLogger(__name__)

_SINGLE_QUERIES_AT_ONCE = 8
_PROBE_TIMEOUT_S = 5.0


class _Round(NamedTuple):
    """One pass over the servers: the hits and the index digest of the first answer, and the faults before."""

    answer: tuple[list[list[Hit]], str] | None
    faults: list[RequestFault]

    @property
    def is_retryable(self) -> bool:
        return self.answer is None and any(fault.is_retryable for fault in self.faults)


class HttpSearch:
    """A search tool that asks a search server, or several servers of the same index.

    The queries of one tick of the event loop are one request (of at most `max_batch`). A request that
    fails goes to the other healthy servers at once. When all have failed, they are tried again after
    `backoff_s`, then after twice that, and so on, `retries` times. If a batch still has no answer, its
    queries are sent one by one, so that one bad query fails alone. A server that keeps failing is skipped
    for a while (a circuit breaker). While all are skipped, a retry waits until one may be tried.

    All answers must come from one index: the one whose digest begins with `digest`, or else the first that
    a server names. The environment variable SRL_SEARCH_TOKEN holds the bearer token, if the servers need
    one. Raises UserError for an invalid URL or token.
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
        self._transport, self._sleep = transport, sleep
        self._token = bearer_token()
        self._expected, self._found_digest = digest, ""
        self._batcher = QueryBatcher(self._answer, max_batch, max_query_chars)
        self._servers = Servers(self.urls, self._responds, clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._client: httpx.AsyncClient | None = None

    @property
    def index_digest(self) -> str:
        """The digest of the index that answers; empty until it is known, and if servers name none."""
        return self._found_digest

    async def connect(self) -> str:
        """The index digest of the servers, which every later answer must have; empty if they name none.

        Raises UserError, naming the servers at fault, if one does not answer searches, if they have
        different indexes, or if the index is not the one that this client was made for.
        """
        statuses = await ask_servers(self._open_client(), self.urls, self._topk, self._timeout_s)
        self._found_digest = agreed_digest(statuses, self._found_digest or self._expected)
        return self._found_digest

    async def search(self, query: str) -> Search:
        """The outcome of one query; never raises.

        `timed_out`, `refused` and `failed` are infrastructure faults. An empty or overlong query is
        `rejected` without being sent.
        """
        return await self._batcher.search(query, self._found_digest)

    async def aclose(self) -> None:
        """Close the connections; the next search opens new ones."""
        self._servers.stop()
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _answer(self, queries: list[str]) -> list[Search]:
        found, fault = await self._ask(queries, self._retries + 1)
        if len(queries) == 1 or fault is None or not fault.may_split:
            return found
        limit = asyncio.Semaphore(_SINGLE_QUERIES_AT_ONCE)

        async def ask_alone(query: str) -> Search:
            async with limit:
                (one,), _ = await self._ask([query], 1)
                return replace(one, attempts=one.attempts + found[0].attempts)

        return await asyncio.gather(*map(ask_alone, queries))

    async def _ask(self, queries: list[str], attempts: int) -> tuple[list[Search], RequestFault | None]:
        """One outcome per query; if no attempt succeeds, all have the same fault, which is returned too."""
        sent = 0

        async def attempt() -> _Round:
            nonlocal sent
            found = await self._round(queries)
            sent += sum(fault.was_sent for fault in found.faults)
            return found

        last = await retried(
            attempt, attempts=attempts, is_retryable=lambda found: found.is_retryable,
            wait_s=lambda number, found: self.wait_s(queries, number, found.faults), sleep=self._sleep,
        )  # fmt: skip
        if last.answer is not None:
            return self._found(queries, sent + 1, *last.answer), None
        return self._failed(queries, sent, last.faults[-1]), last.faults[-1]

    async def _round(self, queries: list[str]) -> _Round:
        """Ask one healthy server after the other until one answers."""
        faults: dict[Server, RequestFault] = {}
        while (server := self._servers.pick(faults)) is not None:
            try:
                return _Round(await self._post(server, queries), list(faults.values()))
            except RequestFault as fault:
                log.debug("a search request failed: %s", fault)
                faults[server] = fault
                if not fault.may_go_elsewhere:
                    break
        return _Round(None, list(faults.values()) or [self._servers.refusal()])

    def _found(self, queries: list[str], sent: int, answers: list[list[Hit]], digest: str) -> list[Search]:
        return [
            Search(query, tuple(hits), "ok" if hits else "empty", 0.0, sent, "", digest)
            for query, hits in zip(queries, answers, strict=True)
        ]

    def _failed(self, queries: list[str], sent: int, fault: RequestFault) -> list[Search]:
        why = str(fault)
        return [Search(query, (), fault.status, 0.0, sent, why, self._found_digest) for query in queries]

    def wait_s(self, queries: Sequence[str], attempt: int, faults: Sequence[RequestFault]) -> float:
        """Seconds to wait after attempt number `attempt` (from 1).

        This is the exponential back-off plus the longer of `Retry-After` and the time until a server may
        be tried, with limits.
        """
        pause = backoff(self._backoff_s, attempt, repeatable_jitter(attempt, queries), MAX_WAIT_S)
        asked_for = min(fault.retry_after_s or 0.0 for fault in faults if fault.is_retryable)
        return min(max(asked_for, self._servers.wait_s), MAX_WAIT_S) + pause

    async def _post(self, server: Server, queries: list[str]) -> tuple[list[list[Hit]], str]:
        """The hits of each query and the digest of the index. Raises RequestFault."""
        body = write_request(queries, self._topk)
        with self._servers.asking(server, hash(body)):
            client = self._open_client()
            hits, digest = await post(client, server.url, body, len(queries), self._topk, self._timeout_s)
            self._check_digest(server.url, digest)
        return hits, digest

    def _check_digest(self, url: str, digest: str) -> None:
        known = self._found_digest or self._expected
        if digest and not digest.startswith(known):
            raise RequestFault("failed", wrong_index(without_secrets(url), digest, known), "setup")
        self._found_digest = digest or self._found_digest

    async def _responds(self, server: Server) -> bool:
        """Whether a server that failed answers on its health page again, with anything but a 5xx."""
        try:
            response = await self._open_client().get(
                health_url(server.url), timeout=min(self._timeout_s, _PROBE_TIMEOUT_S)
            )
        except Exception as error:  # a library may raise anything
            log.debug("%s does not respond: %s", without_secrets(server.url), error)
            return False
        return response.status_code < 500

    def _open_client(self) -> httpx.AsyncClient:
        """The HTTP client of the running event loop; connections of an earlier loop died with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = new_client(self.urls, self._token, self._transport)
        return self._client
