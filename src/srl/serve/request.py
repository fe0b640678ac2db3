"""One request to a search server: its hits, or a typed reason why there are none; and its addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeVar

import httpx

from srl.errors import UserError
from srl.index.retriever import Fault, FaultStatus
from srl.safe import header_secret, quoted, refusal, refuse_credentials
from srl.serve.http import exchange, retry_after
from srl.serve.wire import DIGEST_HEADER, TOKEN_VARIABLE, read_answer, read_digest, read_pages, write_access
from srl.trajectory import Hit, Passage

Cause = Literal["request", "setup", "answer", "link", "busy"]
"""Where a fault lies. `request`: in the request itself. `setup`: the server is configured for something else.
`answer`: the answer is late or invalid. `link`: no connection. `busy`: the server has no capacity now."""

_BUSY = {408, 425, 429, 503}
_SETUP = {401, 403, 404, 405, 407}
_STATUSES: dict[int, FaultStatus] = {503: "refused", 504: "timed_out"}
T = TypeVar("T")


class RequestFault(Fault):
    """Why a request brought no hits, and where that lies."""

    def __init__(
        self, status: FaultStatus, message: str, cause: Cause, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, quoted(message), retry_after_s)
        self.cause: Cause = cause

    @property
    def is_retryable(self) -> bool:
        """Whether the same request may succeed at the same server later."""
        return self.cause in ("answer", "link", "busy")

    @property
    def may_split(self) -> bool:
        """Whether the queries may be answered when each is sent alone.

        A server may refuse a batch because of one query in it, or because its queue has no room for all
        of them. One that limits the rate of requests (429) must not get more of them.
        """
        return self.cause in ("request", "answer") or (self.cause == "busy" and self.status == "refused")


async def post(
    client: httpx.AsyncClient, url: str, body: bytes, queries: int, topk: int, timeout_s: float
) -> tuple[list[list[Hit]], str]:
    """The hits of each query, and the digest of the index that found them. Raises only RequestFault."""

    def read(answer: httpx.Response) -> tuple[list[list[Hit]], str]:
        return read_answer(answer.content, queries, topk), read_digest(answer.headers.get(DIGEST_HEADER))

    return await _answered(client, url, body, queries, timeout_s, read)


async def access(
    client: httpx.AsyncClient, url: str, names: Sequence[str], timeout_s: float
) -> list[Passage | None]:
    """The passages with these ids or addresses, None where there is none. Raises only RequestFault."""

    def read(answer: httpx.Response) -> list[Passage | None]:
        return read_pages(answer.content, len(names))

    return await _answered(client, page_url(url, "access"), write_access(names), 0, timeout_s, read)


async def _answered(
    client: httpx.AsyncClient, url: str, body: bytes, queries: int, timeout_s: float,
    read: Callable[[httpx.Response], T],
) -> T:  # fmt: skip
    """What `read` makes of the answer. Raises only RequestFault."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await exchange(client, "POST", url, body)
        _check_status(url, response.status_code, response.headers, response.content, queries)
        return read(response)
    except RequestFault:
        raise
    except (TimeoutError, httpx.TimeoutException):
        raise RequestFault("timed_out", f"{url}: no answer within {timeout_s:g} s", "answer") from None
    except httpx.ConnectError as error:
        raise RequestFault("refused", f"{url}: no connection ({error})", "link") from error
    except ValueError as error:
        raise RequestFault("failed", f"{url}: {error}", "answer") from error
    except Exception as error:  # a library may raise anything; an episode must get an outcome
        raise RequestFault("failed", f"{url}: {type(error).__name__}: {error}", "answer") from error


def _check_status(url: str, code: int, headers: Mapping[str, str], answer: bytes, queries: int) -> None:
    """Raises RequestFault for every HTTP status but 200."""
    if code == 200:
        return
    reason = refusal(code, answer, 120)
    if code in (413, 422) and queries == 1:
        raise RequestFault("rejected", f"the server refused the query: {reason}", "request")
    if code == 401:
        reason += f"; set the environment variable {TOKEN_VARIABLE} to the server's token"
    cause: Cause = (
        "busy" if code in _BUSY else "setup" if code in _SETUP else "answer" if code >= 500 else "request"
    )
    wait_s = retry_after(headers.get("Retry-After", "")) if code in _BUSY else None
    raise RequestFault(_STATUSES.get(code, "failed"), f"{url}: {reason}", cause, wait_s)


def bearer_token() -> str:
    """The bearer token for search servers, from the environment; may be empty. Raises UserError."""
    return header_secret(TOKEN_VARIABLE)


def retrieve_url(url: str) -> str:
    """`url`, with the path /retrieve if it has none. Raises UserError unless it is an http(s) URL, or if it
    has a user, a password or a query, since it is saved and shown."""
    refuse_credentials("the URL", url)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"{url!r} is not a URL ({error}); expected http://HOST:PORT/retrieve") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UserError(f"{url!r} is not the URL of a search server; expected http://HOST:PORT/retrieve")
    return str(parsed if parsed.path.strip("/") else parsed.copy_with(path="/retrieve"))


def page_url(url: str, page: str) -> str:
    """A page beside /retrieve."""
    parsed = httpx.URL(url)
    before, sign, _ = parsed.path.rpartition("/retrieve")
    path = f"{before}/{page}" if sign else parsed.join(page).path
    return str(parsed.copy_with(path=path))
