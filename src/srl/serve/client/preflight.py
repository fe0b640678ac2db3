"""Checks search servers before a run starts, from every machine that will ask them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import gethostname

import httpx

from srl.errors import UserError
from srl.safe import quoted
from srl.serve.client.request import (
    TOKEN_VARIABLE,
    RequestFault,
    bearer_token,
    health_url,
    new_client,
    post,
    retrieve_url,
    without_secrets,
)
from srl.serve.wire import BadDigestError, read_digest, write_request

_HEALTH_BYTES = 1 << 16
"""Bytes of a /health that are read; a page that is longer is none of a search server."""
QUERY = "Who wrote On the Origin of Species?"
START = "type: srl serve retriever --index DIR"
RETRIEVE = "give the URL of a search server's /retrieve"
TOKEN = f"type: export {TOKEN_VARIABLE}=…"
CHECK_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The digest of a server's index (empty if it names none), or what is wrong and how to fix it."""

    url: str
    digest: str = ""
    problem: str = ""
    remedy: str = ""


def check_servers(
    urls: str | Sequence[str], digest: str = "", *, topk: int = 3, timeout_s: float = CHECK_S
) -> list[str]:
    """Why the servers cannot answer searches from this machine, one line per server; none if all can.

    All must have one index: the one whose digest begins with `digest`, if that is given. Each line begins
    with the name of this machine, since http://127.0.0.1:8000 is a different server on each. Sends one
    request without a query (with one, to servers that have no /health). Blocks; do not call it from an
    event loop.
    """

    async def ask() -> list[ServerStatus]:
        async with new_client(known, bearer_token()) as client:
            return await ask_servers(client, known, topk, timeout_s)

    known = [retrieve_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
        statuses = thread.submit(asyncio.run, ask()).result()
    return [f"{gethostname()}: {line}" for line in problems(statuses, digest)]


async def ask_servers(
    client: httpx.AsyncClient, urls: Iterable[str], topk: int, timeout_s: float
) -> list[ServerStatus]:
    """The status of each server; all are asked at the same time."""
    return await asyncio.gather(*(_ask(client, url, topk, timeout_s) for url in urls))


def problems(statuses: Sequence[ServerStatus], digest: str = "") -> list[str]:
    """What is wrong, one line per server at fault."""
    lines = [f"{one.problem}; {_remedy(one, statuses)}" for one in statuses if one.problem]
    return lines + _wrong_indexes([one for one in statuses if not one.problem and one.digest], digest)


def agreed_digest(statuses: Sequence[ServerStatus], digest: str = "") -> str:
    """The digest that all servers have, which begins with `digest`; empty if none names its own.

    Raises UserError, one line that names every server at fault, unless all can answer.
    """
    lines = problems(statuses, digest)
    if len(lines) > 1:
        raise UserError(f"{len(lines)} search servers cannot be used: {' · '.join(lines)}")
    if lines:
        raise UserError(lines[0])
    return next((one.digest for one in statuses if one.digest), "")


def wrong_index(name: str, digest: str, expected: str) -> str:
    """The message for a server whose index is not the one that a run searches."""
    return (
        f"{name} has another index: expected digest {expected[:12]}, found {digest[:12]}; "
        "serve the expected index"
    )


async def _ask(client: httpx.AsyncClient, url: str, topk: int, timeout_s: float) -> ServerStatus:
    """The server's /health, then an empty search, which needs the token (/health does not)."""
    name = without_secrets(url)
    try:
        digest = await _health(client, url, timeout_s)
    except BadDigestError as error:
        return ServerStatus(url, problem=f"{name}: {error}", remedy=RETRIEVE)
    except Exception as error:  # a library may raise anything
        why = f"no search server answers at {name} ({type(error).__name__}: {error})"
        return ServerStatus(url, problem=quoted(why), remedy=START)
    queries = [] if digest else [QUERY]
    body = write_request(queries, topk)
    try:
        _, named = await post(client, url, body, len(queries), topk, timeout_s)
    except RequestFault as fault:
        if fault.cause == "busy":
            return ServerStatus(url, digest)
        why = str(fault).removeprefix(f"{name}: ")
        remedy = TOKEN if TOKEN_VARIABLE in why else RETRIEVE
        return ServerStatus(url, problem=f"{name} responds, but not to searches: {why}", remedy=remedy)
    return ServerStatus(url, digest or named)


async def _health(client: httpx.AsyncClient, url: str, timeout_s: float) -> str:
    """The digest in the server's /health; empty if it has no such page, or names none.

    Raises BadDigestError.
    """
    body = bytearray()
    async with asyncio.timeout(timeout_s), client.stream("GET", health_url(url)) as response:
        async for chunk in response.aiter_bytes():
            body += chunk
            if response.status_code != 200 or len(body) > _HEALTH_BYTES:
                break
    try:
        found = json.loads(body) if response.status_code == 200 else {}
    except (ValueError, RecursionError):
        found = {}
    return read_digest(found.get("index_digest")) if isinstance(found, dict) else ""


def _remedy(one: ServerStatus, statuses: Sequence[ServerStatus]) -> str:
    return f"{one.remedy}, or remove it from the list" if len(statuses) > 1 else one.remedy


def _wrong_indexes(statuses: Sequence[ServerStatus], digest: str) -> list[str]:
    """Servers whose index is not `digest`; if that is empty, not the one that most of them have."""
    if digest:
        return [
            wrong_index(without_secrets(one.url), one.digest, digest)
            for one in statuses
            if not one.digest.startswith(digest)
        ]
    counts = Counter(one.digest for one in statuses).most_common()
    if len(counts) < 2:
        return []
    (most, servers), (_, second) = counts[:2]
    odd = [one for one in statuses if servers == second or one.digest != most]
    said = ", ".join(f"{without_secrets(one.url)} {one.digest[:12]}" for one in odd)
    others = "" if servers == second else f", the others {most[:12]}"
    return [f"the search servers have different indexes: {said}{others}; serve one index from all"]
