"""Whether search servers can answer a run: asked before it starts, from every machine that will ask them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from socket import gethostname

import httpx

from srl.errors import UserError
from srl.safe_text import quoted
from srl.serve.client.request import (
    TOKEN_VARIABLE,
    RequestFault,
    connections,
    health_url,
    post,
    retrieve_url,
    shown,
    token,
)
from srl.serve.wire import BadDigestError, read_digest, write_request

QUERY = "Who wrote On the Origin of Species?"
START = "type: srl serve retriever --index DIR"
RETRIEVE = "give the URL of a search server's /retrieve"
TOKEN = f"type: export {TOKEN_VARIABLE}=…"
CHECK_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """What one server answered: the digest of its index (empty where it names none), or what is wrong."""

    url: str
    digest: str = ""
    problem: str = ""
    remedy: str = ""


def check_servers(
    urls: str | Sequence[str], digest: str = "", *, topk: int = 3, timeout_s: float = CHECK_S
) -> list[str]:
    """What keeps the servers from answering searches of this machine, a line each; none when all can.

    All must have one index: the one whose digest begins with `digest`, where that is given. The name of
    this machine begins each line: http://127.0.0.1:8000 is another server on each. It sends one request
    with no query in it (a query, to servers that have no /health), and waits: not for an event loop.
    """

    async def look() -> list[ServerStatus]:
        async with connections(known, token()) as client:
            return await look_at(client, known, topk, timeout_s)

    known = [retrieve_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
    with ThreadPoolExecutor(1) as thread:  # of its own: the caller's may have a loop that runs
        looked = thread.submit(asyncio.run, look()).result()
    return [f"{gethostname()}: {line}" for line in problems(looked, digest)]


async def look_at(
    client: httpx.AsyncClient, urls: Iterable[str], topk: int, timeout_s: float
) -> list[ServerStatus]:
    """What each server answers, all asked at the same time."""
    return await asyncio.gather(*(_look(client, url, topk, timeout_s) for url in urls))


def problems(looked: Sequence[ServerStatus], digest: str = "") -> list[str]:
    """What is wrong, in a line for each server at fault."""
    lines = [f"{one.problem}; {_remedy(one, looked)}" for one in looked if one.problem]
    return lines + _other_indexes([one for one in looked if not one.problem and one.digest], digest)


def agreed(looked: Sequence[ServerStatus], digest: str = "") -> str:
    """The digest that all servers have; `digest` where none names its own.

    Raises UserError, one line that names every server at fault, unless all can answer.
    """
    lines = problems(looked, digest)
    if len(lines) > 1:
        raise UserError(f"{len(lines)} search servers cannot be used: {' · '.join(lines)}")
    if lines:
        raise UserError(lines[0])
    return next((one.digest for one in looked if one.digest), digest)


def other_index(name: str, digest: str, expected: str) -> str:
    """What to say of a server with another index than the one that a run searches."""
    return (
        f"{name} has another index: {digest[:12]}, not {expected[:12]}, which this run searches; "
        "serve that one again"
    )


async def _look(client: httpx.AsyncClient, url: str, topk: int, timeout_s: float) -> ServerStatus:
    """Its /health, and a search in which nothing is searched for: that needs the token, /health does not."""
    try:
        digest = await _health(client, url, timeout_s)
    except BadDigestError as error:
        return ServerStatus(url, problem=f"{shown(url)}: {error}", remedy=RETRIEVE)
    except Exception as error:  # whatever a library raises, the message is one line
        why = f"no search server answers at {shown(url)} ({type(error).__name__}: {error})"
        return ServerStatus(url, problem=quoted(why), remedy=START)
    queries = [] if digest else [QUERY]
    body = write_request(queries, topk)
    try:
        _, named = await post(client, url, body, len(queries), topk, timeout_s)
    except RequestFault as fault:
        if fault.cause == "busy":
            return ServerStatus(url, digest)
        why = str(fault).removeprefix(f"{shown(url)}: ")
        problem = f"{shown(url)} answers, but not to searches: {why}"
        return ServerStatus(url, problem=problem, remedy=TOKEN if TOKEN_VARIABLE in why else RETRIEVE)
    return ServerStatus(url, digest or named)


async def _health(client: httpx.AsyncClient, url: str, timeout_s: float) -> str:
    """The digest in the server's /health; empty where it has no such page, or names none.

    Raises BadDigestError.
    """
    async with asyncio.timeout(timeout_s):
        response = await client.get(health_url(url))
    try:
        found = response.json() if response.status_code == 200 else {}
    except (ValueError, RecursionError):
        found = {}
    return read_digest(found.get("index_digest")) if isinstance(found, dict) else ""


def _remedy(one: ServerStatus, looked: Sequence[ServerStatus]) -> str:
    return f"{one.remedy}, or take it out of the list" if len(looked) > 1 else one.remedy


def _other_indexes(looked: Sequence[ServerStatus], digest: str) -> list[str]:
    """Those whose index is not `digest`; where none is given, not the one that most of them have."""
    if digest:
        return [
            other_index(shown(one.url), one.digest, digest)
            for one in looked
            if not one.digest.startswith(digest)
        ]
    counts = Counter(one.digest for one in looked).most_common()
    if len(counts) < 2:
        return []
    (most, servers), (_, second) = counts[:2]
    odd = [one for one in looked if servers == second or one.digest != most]
    said = ", ".join(f"{shown(one.url)} {one.digest[:12]}" for one in odd)
    others = "" if servers == second else f", the others {most[:12]}"
    return [f"the search servers have different indexes: {said}{others}; serve one index from all"]
