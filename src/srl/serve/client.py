"""The search client: `HttpSearch`, over one server or several, and the check of the servers before a run.

What a time-out or a status of one request means is in `request.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import monotonic, perf_counter

import httpx
import tenacity

from srl.errors import UserError
from srl.safe import quoted
from srl.serve.documents import as_document, passages_of
from srl.serve.http import exchange, new_client
from srl.serve.query_batcher import MAX_QUERY_CHARS, QueryBatcher
from srl.serve.request import (
    RequestFault,
    access,
    bearer_token,
    page_url,
    post,
    retrieve_url,
)
from srl.serve.wire import read_digest, write_request
from srl.trajectory import Hit, Passage, Search

log = logging.getLogger(__name__)

FAILURES = 5
"""Failed requests in a row after which a server is left alone for `COOL_DOWN_S`; one that cannot be reached
is left alone at once."""
COOL_DOWN_S = 5.0
MAX_BATCH = 128
BACKOFF_S = 1.0
MAX_WAIT_S = 10.0
"""The longest wait before a retry, whatever `Retry-After` says."""
_SINGLE_QUERIES_AT_ONCE = 8
_QUERY = "Who wrote On the Origin of Species?"

Exchange = Callable[[str, list[str]], Awaitable[tuple[list[list[Hit]], str]]]
"""Asks the server at a URL: the hits of each query, and the digest of its index. Raises RequestFault."""


@dataclass(slots=True, eq=False)
class Server:
    """A URL and how it fares; times in seconds of the client's clock."""

    url: str
    in_flight: int = 0
    """Requests that wait for its answer."""
    last_turn: int = -1
    failures: int = 0
    """Failed requests since the last answer."""
    rests_until_s: float = 0.0

    def answered(self) -> None:
        self.failures, self.rests_until_s = 0, 0.0

    def failed(self, fault: RequestFault, now_s: float) -> None:
        if fault.cause == "request":
            return
        if fault.cause == "busy":
            self.rests_until_s = now_s + min(fault.retry_after_s or 0.0, MAX_WAIT_S)
            return
        self.failures += FAILURES if fault.cause in ("link", "setup") else 1
        if self.failures >= FAILURES:
            self.rests_until_s = now_s + COOL_DOWN_S


class HttpSearch:
    """A search tool that asks a search server, or several servers of the same index.

    The queries of one tick of the event loop are one request (of at most `MAX_BATCH`). It goes to the server
    with the fewest requests in flight; if that fails, to the next one at once. When all have failed they are
    asked again after about `BACKOFF_S`, twice that, and so on, or when they said (`Retry-After`), `retries`
    times. If a batch still has no answer, its queries are sent one by one, so that one bad query fails alone.
    A server that keeps failing is asked again every `COOL_DOWN_S` while another one answers.

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
        max_query_chars: int = MAX_QUERY_CHARS,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.urls = [retrieve_url(each) for each in ([url] if isinstance(url, str) else url)]
        self.index_digest = ""
        """The digest of the index that answers; empty until it is known, and if servers name none."""
        self._servers = [Server(each) for each in self.urls]
        self._topk, self._expected, self._timeout_s, self._retries = topk, digest, timeout_s, retries
        self._backoff = tenacity.wait_exponential_jitter(BACKOFF_S, max=MAX_WAIT_S, jitter=BACKOFF_S)
        self._batcher = QueryBatcher(self._answer, MAX_BATCH, max_query_chars)
        self._transport, self._clock, self._sleep = transport, clock, sleep
        self._token, self._turns = bearer_token(), count()
        self._client: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def connect(self) -> str:
        """The index digest of the servers, which every later answer must have; empty if they name none.

        Raises UserError, naming the servers at fault, if one does not answer searches, if they have
        different indexes, or if the index is not the one that this client was made for.
        """
        looks = await asyncio.gather(*map(self._look, self.urls))
        problems = [problem for _, problem in looks if problem]
        digests = [(url, digest) for url, (digest, _) in zip(self.urls, looks, strict=True) if digest]
        expected = self.index_digest or self._expected
        if digests and not expected:  # most servers are right
            expected = Counter(digest for _, digest in digests).most_common(1)[0][0]
        problems += [
            _wrong_index(url, digest, expected) for url, digest in digests if not digest.startswith(expected)
        ]
        if problems:
            raise UserError(" · ".join(problems))
        self.index_digest = digests[0][1] if digests else ""
        return self.index_digest

    async def _look(self, url: str) -> tuple[str, str]:
        """The index digest of a server (empty if it names none), and why it answers no searches, if so.

        Asks for /health, then for a search, which needs the token; an empty one where /health has a digest.
        """
        client, digest = self._open_client(), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                health = await exchange(client, "GET", page_url(url, "health"))
            if health.status_code == 200:
                page = json.loads(health.content)
                digest = read_digest(page.get("index_digest")) if isinstance(page, dict) else ""
        except (ValueError, RecursionError):
            pass  # a server without a health page of ours
        except Exception as error:  # a library may raise anything
            why = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError | httpx.TimeoutException):
                why = f"nothing within {self._timeout_s:g} s"
            why = quoted(f"no search server answers at {url} ({why})")
            return "", f"{why}; type: srl serve retriever --index DIR"
        queries = [] if digest else [_QUERY]
        body = write_request(queries, self._topk)
        try:
            _, search_digest = await post(client, url, body, len(queries), self._topk, self._timeout_s)
        except RequestFault as fault:
            if fault.cause != "busy":
                return "", f"{url} answers, but no searches: {str(fault).removeprefix(f'{url}: ')}"
            search_digest = ""
        return digest or search_digest, ""

    async def search(self, query: str) -> Search:
        """The outcome of one query; never raises.

        `timed_out`, `refused` and `failed` are infrastructure faults. An empty or overlong query is
        `rejected` without being sent.
        """
        return await self._batcher.search(query, self.index_digest)

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The passages of the document of `passage`, in order; never raises."""
        began, ask = perf_counter(), partial(self._access, passage)
        (outcome,), _ = await self._ask([passage.id], self._retries + 1, ask)
        outcome = replace(outcome, latency_s=perf_counter() - began)
        return as_document(outcome, passage, self.index_digest)

    async def _access(self, passage: Passage, url: str, names: list[str]) -> tuple[list[list[Hit]], str]:
        """The passages of one document, as the hits of one query."""

        async def look_up(names: list[str]) -> list[Passage | None]:
            return await access(self._open_client(), url, names, self._timeout_s)

        return [await passages_of(passage, look_up)], ""

    async def lacks_documents(self) -> str:
        """Why a server has none: no /access, or a live index."""
        client = self._open_client()
        for url in self.urls:
            try:
                await access(client, url, [], self._timeout_s)
                async with asyncio.timeout(self._timeout_s):
                    health = await exchange(client, "GET", page_url(url, "health"))
                about = json.loads(health.content) if health.status_code == 200 else None
            except Exception as error:  # a library may raise anything
                return f"no documents from {url}: {error}"
            if isinstance(about, dict) and about.get("live") is True:
                return f"{url}: a live retriever has no documents"
        return ""

    async def aclose(self) -> None:
        """Close the connections; the next search opens new ones."""
        if self._client is not None and self._loop is asyncio.get_running_loop():
            await self._client.aclose()
        self._client = None

    async def _answer(self, queries: list[str]) -> list[Search]:
        """One outcome per query: of the whole batch, or else of each query alone."""
        outcomes, fault = await self._ask(queries, self._retries + 1)
        if len(queries) == 1 or fault is None or not fault.may_split:
            return outcomes
        room = asyncio.Semaphore(_SINGLE_QUERIES_AT_ONCE)

        async def alone(query: str) -> Search:
            async with room:
                (outcome,), _ = await self._ask([query], 1)
                return replace(outcome, attempts=outcome.attempts + outcomes[0].attempts)

        return await asyncio.gather(*map(alone, queries))

    async def _ask(
        self, queries: list[str], attempts: int, ask: Exchange | None = None
    ) -> tuple[list[Search], RequestFault | None]:
        """One outcome per query; if no attempt succeeds, all have the same fault, which is returned too.

        `ask` asks a server, by default for the hits of the queries.
        """
        sent = 0

        async def attempt() -> list[Search]:
            """Ask one server after the other until one answers. Raises the fault that is the most hopeful."""
            nonlocal sent
            faults: list[RequestFault] = []
            tried: list[Server] = []
            while (server := self._next_server(tried)) is not None:
                tried.append(server)
                sent += 1
                try:
                    hits, digest = await self._post(server, queries, ask or self._retrieve)
                except RequestFault as fault:
                    log.debug("a search request failed: %s", fault)
                    faults.append(fault)
                    if fault.cause == "request":
                        break
                    continue
                return [
                    Search(query, tuple(query_hits), "ok" if query_hits else "empty", 0.0, sent, "", digest)
                    for query, query_hits in zip(queries, hits, strict=True)
                ]
            waits = [fault for fault in faults if fault.is_retryable]
            raise min(waits, key=lambda fault: fault.retry_after_s or 0.0) if waits else faults[-1]

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, RequestFault) and error.is_retryable
            ),
            stop=tenacity.stop_after_attempt(attempts),
            wait=self._wait_s,
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return await retrying(attempt), None
        except RequestFault as fault:
            why, digest = str(fault), self.index_digest
            return [Search(query, (), fault.status, 0.0, sent, why, digest) for query in queries], fault

    def _wait_s(self, state: tenacity.RetryCallState) -> float:
        """Exponential back-off with jitter, or as long as the server asks, within limits."""
        fault = state.outcome.exception() if state.outcome is not None else None
        asked_s = fault.retry_after_s or 0.0 if isinstance(fault, RequestFault) else 0.0
        return max(self._backoff(state), min(asked_s, MAX_WAIT_S))

    def _next_server(self, tried: Sequence[Server]) -> Server | None:
        """The awake server with the fewest requests in flight, in turn; the first to wake if all rest.

        None once all that are awake have been tried.
        """
        now_s = self._clock()
        awake = [server for server in self._servers if server.rests_until_s <= now_s]
        if not awake and not tried:
            return min(self._servers, key=lambda server: server.rests_until_s)
        ready = [server for server in awake if server not in tried]
        return min(ready, key=lambda server: (server.in_flight, server.last_turn), default=None)

    async def _retrieve(self, url: str, queries: list[str]) -> tuple[list[list[Hit]], str]:
        body = write_request(queries, self._topk)
        return await post(self._open_client(), url, body, len(queries), self._topk, self._timeout_s)

    async def _post(self, server: Server, queries: list[str], ask: Exchange) -> tuple[list[list[Hit]], str]:
        """The hits of each query and the digest of the index. Raises RequestFault."""
        server.last_turn = next(self._turns)
        server.in_flight += 1
        if server.failures >= FAILURES:  # this request tries whether it is back; the others keep off
            server.rests_until_s = self._clock() + COOL_DOWN_S
        try:
            hits, digest = await ask(server.url, queries)
            expected = self.index_digest or self._expected
            if digest and not digest.startswith(expected):
                raise RequestFault("failed", _wrong_index(server.url, digest, expected), "setup")
        except RequestFault as fault:
            server.failed(fault, self._clock())
            raise
        finally:
            server.in_flight -= 1
        server.answered()
        self.index_digest = digest or self.index_digest
        return hits, digest

    def _open_client(self) -> httpx.AsyncClient:
        """The HTTP client of the running event loop; connections of an earlier loop died with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            self._loop = loop
            self._client = new_client(self.urls, self._token, self._transport)
        return self._client


def _wrong_index(url: str, digest: str, expected: str) -> str:
    return f"{url} has another index: expected digest {expected[:12]}, found {digest[:12]}"
