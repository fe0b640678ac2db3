"""`srl serve check`: whether a search server can serve episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose

import httpx

from srl.errors import UserError
from srl.process import run_async
from srl.safe import quoted
from srl.serve.client import HttpSearch
from srl.trajectory import Search

QUERIES = ("Where was the first president of the country born?", "Who is the mayor of the capital city?")


@dataclass(frozen=True, slots=True)
class ServerCheck:
    """A server that answers searches; it can serve episodes if `problems` is empty."""

    url: str
    index_digest: str
    problems: tuple[str, ...]


def check_server(
    url: str,
    queries: Sequence[str] = QUERIES,
    topk: int = 3,
    transport: httpx.AsyncBaseTransport | None = None,
) -> ServerCheck:
    """Search for `queries` together and one by one, as episodes do, with the token if there is one.

    Blocks. Raises UserError if the server answers no searches, and if no query has hits.
    """

    async def outcomes() -> tuple[list[Search], list[Search]]:
        try:
            await search.connect()
            together = await asyncio.gather(*map(search.search, queries))
            return together, [await search.search(query) for query in queries]
        finally:
            await search.aclose()

    search = HttpSearch(url, topk, retries=0, transport=transport)
    pairs = list(zip(*run_async(outcomes()), strict=True))
    problems = [f"{quoted(one.query, 60)!r}: {why}" for one, alone in pairs if (why := _problem(one, alone))]
    if not problems and not any(one.hits for one, _ in pairs):
        raise UserError("no query has hits", key="query", hint="ask what the corpus has")
    return ServerCheck(search.urls[0], search.index_digest, tuple(problems))


def _problem(together: Search, alone: Search) -> str:
    """What is wrong with the answers to one query, asked with others and alone; empty if nothing is."""
    if fault := next((one.error for one in (together, alone) if one.error), ""):
        return fault
    scores = [hit.score for hit in together.hits]
    if scores != sorted(scores, reverse=True):
        return "the hits are not in the order of their scores"
    same = len(together.hits) == len(alone.hits) and all(
        one.passage.id == other.passage.id and isclose(one.score, other.score, abs_tol=1e-3)
        for one, other in zip(together.hits, alone.hits, strict=True)
    )
    return "" if same else "the hits of a query alone are not those in a batch"
