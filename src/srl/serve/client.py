"""Search over HTTP: one request for the queries of a tick, time-outs, retries, typed outcomes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from itertools import count
from time import perf_counter
from typing import Literal

import httpx

from srl.errors import UserError
from srl.serve.batching import MAX_QUERY_CHARS, TickBatcher, clean, rejection
from srl.serve.wire import DIGEST_HEADER, read_answer, write_request
from srl.trajectory import Hit, Search

log = logging.getLogger(__name__)

_MAX_WAIT_S = 10.0
_PASSING = {408, 425, 429}
_JSON = {"Content-Type": "application/json"}


class _FaultError(Exception):
    """Why a request brought no hits; `passing` when trying again may help."""

    def __init__(
        self,
        status: Literal["timed_out", "refused", "failed", "rejected"],
        message: str,
        passing: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.passing = passing


class HttpSearch:
    """Answers episodes from a search server, or from several that serve one index, in turn.

    Queries that arrive in one tick are one request (of at most `max_batch`). A request that fails is
    tried again `retries` times, after `backoff_s`, twice that, and so on; when a batch still has no
    answer its queries are asked one by one, so that one bad query fails alone.
    """

    def __init__(
        self,
        url: str | Sequence[str],
        topk: int = 3,
        *,
        timeout_s: float = 30.0,
        retries: int = 3,
        backoff_s: float = 0.2,
        max_query_chars: int = MAX_QUERY_CHARS,
        max_batch: int = 128,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.urls = [retrieve_url(one) for one in ([url] if isinstance(url, str) else url)]
        self._topk, self._timeout_s = topk, timeout_s
        self._retries, self._backoff_s = retries, backoff_s
        self._max_query_chars = max_query_chars
        self._transport = transport
        self._batcher = TickBatcher(self._answer, max_batch)
        self._requests = count()
        self._digest = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._opened: httpx.AsyncClient | None = None

    @property
    def index_digest(self) -> str:
        """The digest that the server named last; empty before it answers, and where it names none."""
        return self._digest

    async def connect(self) -> str:
        """The index digest of the servers. Raises UserError where one does not answer, or they differ."""
        digests = {url: await self._health(url) for url in self.urls}
        named = {digest for digest in digests.values() if digest}
        if len(named) > 1:
            said = ", ".join(f"{url} {digest[:12] or '?'}" for url, digest in digests.items())
            raise UserError(f"the search servers have different indexes: {said}; serve one index from all")
        self._digest = next(iter(named), "")
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
        if self._opened is not None and self._loop is asyncio.get_running_loop():
            await self._opened.aclose()
        self._opened = None

    async def _answer(self, queries: list[str]) -> list[Search]:
        found = await self._ask(queries, attempts=self._retries + 1)
        if len(queries) == 1 or found[0].status in ("ok", "empty", "refused"):
            return found
        alone = await asyncio.gather(*(self._ask([query], attempts=1) for query in queries))
        return [replace(one, attempts=one.attempts + found[0].attempts) for (one,) in alone]

    async def _ask(self, queries: list[str], attempts: int) -> list[Search]:
        """One outcome for each query; all have the same fault when the last attempt fails."""
        for attempt in range(1, attempts + 1):
            try:
                answers, digest = await self._post(queries)
            except _FaultError as fault:
                if not fault.passing or attempt == attempts:
                    why = str(fault)
                    return [Search(one, (), fault.status, 0.0, attempt, why, self._digest) for one in queries]
                log.debug("search attempt %d: %s; trying again", attempt, fault)
                await asyncio.sleep(min(self._backoff_s * 2 ** (attempt - 1), _MAX_WAIT_S))
            else:
                return [
                    Search(query, tuple(hits), "ok" if hits else "empty", 0.0, attempt, "", digest)
                    for query, hits in zip(queries, answers, strict=True)
                ]
        raise AssertionError("unreachable: the last attempt returns")

    async def _post(self, queries: list[str]) -> tuple[list[list[Hit]], str]:
        """One request: the hits of each query and the digest of the index. Raises _FaultError."""
        url = self.urls[next(self._requests) % len(self.urls)]
        client, body = self._client(), write_request(queries, self._topk)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await client.post(url, content=body, headers=_JSON)
        except (TimeoutError, httpx.TimeoutException):
            raise _FaultError("timed_out", f"{url}: no answer within {self._timeout_s:g} s") from None
        except httpx.ConnectError as error:
            raise _FaultError("refused", f"{url}: no connection ({error})") from error
        except httpx.HTTPError as error:
            raise _FaultError("failed", f"{url}: {type(error).__name__}: {error}") from error
        self._check_status(url, response, len(queries))
        try:
            answers = read_answer(response.content, len(queries), self._topk)
        except ValueError as error:
            raise _FaultError("failed", f"{url}: {error}") from error
        return answers, self._note_digest(url, response.headers.get(DIGEST_HEADER, ""))

    def _check_status(self, url: str, response: httpx.Response, queries: int) -> None:
        code = response.status_code
        if code == 200:
            return
        said = " ".join(response.text[:120].split())
        if code == 413 and queries == 1:
            raise _FaultError("rejected", f"the server refused the query: {said}", passing=False)
        raise _FaultError("failed", f"{url}: HTTP {code}: {said}", passing=code >= 500 or code in _PASSING)

    def _note_digest(self, url: str, digest: str) -> str:
        if digest and digest != self._digest:
            if self._digest:
                log.warning("%s has another index now: %s, it was %s", url, digest[:12], self._digest[:12])
            self._digest = digest
        return digest or self._digest

    async def _health(self, url: str) -> str:
        """The digest in the server's /health; empty where it has no such page, or names none."""
        page = httpx.URL(url).join("health")
        try:
            response = await self._client().get(page, timeout=self._timeout_s)
            found = response.json() if response.status_code == 200 else {}
        except httpx.HTTPError as error:
            raise UserError(
                f"no search server answers at {url} ({type(error).__name__}: {error}); "
                "type: srl serve retriever --index DIR"
            ) from error
        except ValueError:
            found = {}
        return str(found.get("index_digest") or "") if isinstance(found, dict) else ""

    def _client(self) -> httpx.AsyncClient:
        """The connections of the running event loop; those of an earlier loop died with it."""
        loop = asyncio.get_running_loop()
        if self._opened is None or self._loop is not loop:
            self._loop = loop
            self._opened = httpx.AsyncClient(
                transport=self._transport,
                timeout=None,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
                trust_env=not all(is_loopback(httpx.URL(url).host) for url in self.urls),
                follow_redirects=True,
            )
        return self._opened


def retrieve_url(url: str) -> str:
    """`url` with /retrieve where it has no path. Raises UserError for what is no http URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url!r} is not a URL ({error}); expected http://HOST:PORT/retrieve") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is not the URL of a search server; expected http://HOST:PORT/retrieve")
    return str(parsed if parsed.path.strip("/") else parsed.copy_with(path="/retrieve"))


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine: such connections never go through a proxy."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
