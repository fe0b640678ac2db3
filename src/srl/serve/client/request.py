"""One request to a search server: the hits that it brings, or a typed reason why it brings none."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import Literal

import httpx

from srl.errors import UserError
from srl.safe_text import quoted
from srl.serve.wire import DIGEST_HEADER, MAX_QUOTED, is_loopback, read_answer, read_digest
from srl.trajectory import Hit

TOKEN_VARIABLE = "SRL_SEARCH_TOKEN"
MAX_ANSWER_BYTES = 64 << 20

FaultStatus = Literal["timed_out", "refused", "failed", "rejected"]
Cause = Literal["request", "setup", "answer", "link", "busy", "resting", "waiting"]
"""What a fault tells of the server: the request is at fault, the server is set up for something else,
its answer is none or late, it cannot be reached, it has no time now. Or nothing was sent: `waiting`, as all
servers are left alone for a while, or until one request has tried; `resting`, where that will not help."""

_BUSY = {408, 425, 429, 503}
_SETUP = {401, 403, 404, 405, 407}
_STATUSES: dict[int, FaultStatus] = {503: "refused", 504: "timed_out"}


class RequestFault(Exception):  # noqa: N818 - a fault, as in srl.index.Fault
    """Why a request brought no hits, in one line that is safe to show.

    `retry_after_s` is when the server wants to be asked again.
    """

    def __init__(
        self, status: FaultStatus, message: str, cause: Cause, retry_after_s: float | None = None
    ) -> None:
        super().__init__(quoted(message))
        self.status: FaultStatus = status
        self.cause: Cause = cause
        self.retry_after_s = retry_after_s

    @property
    def again(self) -> bool:
        """Whether the same request may succeed at the same server, later."""
        return self.cause in ("answer", "link", "busy", "waiting")

    @property
    def was_sent(self) -> bool:
        """Whether the request reached out for a server."""
        return self.cause not in ("resting", "waiting")

    @property
    def elsewhere(self) -> bool:
        """Whether another server may answer it."""
        return self.cause != "request"

    @property
    def one_by_one(self) -> bool:
        """Whether its queries may be answered when each is asked alone.

        A server refuses a batch also for one query in it, or because its line has no room for so many;
        one that counts requests (429) wants no more of them.
        """
        return self.cause in ("request", "answer") or (self.cause == "busy" and self.status == "refused")


async def post(
    client: httpx.AsyncClient, url: str, body: bytes, queries: int, topk: int, timeout_s: float
) -> tuple[list[list[Hit]], str]:
    """The hits of each query, and the digest of the index that found them. Raises RequestFault only."""
    name = shown(url)
    try:
        async with asyncio.timeout(timeout_s):
            code, headers, answer = await _exchange(client, url, body)
        check_status(name, code, headers, answer, queries)
        return read_answer(answer, queries, topk), read_digest(headers.get(DIGEST_HEADER))
    except RequestFault:
        raise
    except (TimeoutError, httpx.TimeoutException):
        raise RequestFault("timed_out", f"{name}: no answer within {timeout_s:g} s", "answer") from None
    except httpx.ConnectError as error:
        raise RequestFault("refused", f"{name}: no connection ({error})", "link") from error
    except ValueError as error:
        raise RequestFault("failed", f"{name}: {error}", "answer") from error
    except Exception as error:  # whatever a library raises, an episode gets an outcome
        raise RequestFault("failed", f"{name}: {type(error).__name__}: {error}", "answer") from error


async def _exchange(client: httpx.AsyncClient, url: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer. Raises ValueError where it has no end."""
    answer = bytearray()
    async with client.stream(
        "POST", url, content=body, headers={"Content-Type": "application/json"}
    ) as response:
        async for chunk in response.aiter_bytes():
            answer += chunk
            if len(answer) > MAX_ANSWER_BYTES:
                raise ValueError(f"the answer is larger than {MAX_ANSWER_BYTES:,} bytes")
    return response.status_code, response.headers, bytes(answer)


def check_status(name: str, code: int, headers: Mapping[str, str], answer: bytes, queries: int) -> None:
    """Raises RequestFault for every status but 200."""
    if code == 200:
        return
    said = f"HTTP {code}: {quoted(answer[:MAX_QUOTED], 120)}"
    if code in (413, 422) and queries == 1:
        raise RequestFault("rejected", f"the server refused the query: {said}", "request")
    if code == 401:
        said += f"; the server wants the right token in the environment variable {TOKEN_VARIABLE}"
    cause: Cause = (
        "busy" if code in _BUSY else "setup" if code in _SETUP else "answer" if code >= 500 else "request"
    )
    wait = retry_after(headers.get("Retry-After", "")) if code in _BUSY else None
    raise RequestFault(_STATUSES.get(code, "failed"), f"{name}: {said}", cause, wait)


def retry_after(value: str) -> float | None:
    """Seconds in a header `Retry-After`, which holds them or a date; None where it holds neither."""
    try:
        return max(0.0, float(int(value)))
    except (ValueError, OverflowError):
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError, IndexError):
        return None


def token() -> str:
    """The bearer token for search servers, from the environment; may be empty. Raises UserError."""
    found = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not all("!" <= letter <= "~" for letter in found):
        raise UserError(f"{TOKEN_VARIABLE} is no token: it holds characters that no HTTP header can carry")
    return found


def connections(
    urls: Sequence[str], token: str, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Connections to search servers, which carry the token; time-outs are the requests' own."""
    return httpx.AsyncClient(
        transport=transport,
        headers={"Authorization": f"Bearer {token}"} if token else None,
        timeout=None,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        trust_env=not all(is_loopback(httpx.URL(url).host) for url in urls),
        follow_redirects=True,
    )


def retrieve_url(url: str) -> str:
    """`url` with /retrieve where it has no path. Raises UserError for what is no http URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url!r} is not a URL ({error}); expected http://HOST:PORT/retrieve") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is not the URL of a search server; expected http://HOST:PORT/retrieve")
    return str(parsed if parsed.path.strip("/") else parsed.copy_with(path="/retrieve"))


def health_url(url: str) -> str:
    """The page that tells of what is searched at `url`: /health, and /health/NAME for /retrieve/NAME."""
    parsed = httpx.URL(url)
    before, found, name = parsed.path.rpartition("/retrieve/")
    path = f"{before}/health/{name}" if found else parsed.join("health").path
    return str(parsed.copy_with(path=path, query=None))


def shown(url: str) -> str:
    """`url` without what may be secret in it."""
    parsed = httpx.URL(url)
    return str(parsed.copy_with(userinfo=b"", query=None, fragment=None))
