"""Search servers that are functions of a request, by host, and a clock that does what it is told."""

import asyncio
import heapq
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from srl.serve import HttpSearch, LocalSearch
from srl.serve.named_retrievers import aclose
from srl.trajectory import Search

ONE, TWO, THREE = "http://one/retrieve", "http://two/retrieve", "http://three/retrieve"


class Clock:
    """Time that passes for all sleepers at once: on to the next to wake, whenever nothing else happens."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self._asleep: list[tuple[float, int, asyncio.Future[None]]] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        awake = asyncio.get_running_loop().create_future()
        heapq.heappush(self._asleep, (self.now + seconds, len(self.slept), awake))
        self.slept.append(seconds)
        await awake

    async def gather(self, *calls: Awaitable[Search]) -> list[Search]:
        together = asyncio.gather(*calls)
        while not together.done():
            for _ in range(60):
                await asyncio.sleep(0)
            if self._asleep and not together.done():
                self.now, _, awake = heapq.heappop(self._asleep)
                awake.set_result(None)
        return await together


class Site:
    """Servers by host: each has a status or raises, and finds the query itself; what was asked is kept."""

    def __init__(self, **statuses: int | type[Exception]) -> None:
        self.statuses = dict(statuses)
        self.headers: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.asked: list[str] = []
        """The host of each search."""
        self.queries: list[list[str]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host, status = request.url.host, self.statuses[request.url.host]
        if request.method == "POST":
            self.asked.append(host)
        if not isinstance(status, int):
            raise status("no luck")
        digest = self.digests.get(host, "d1")
        headers = {"X-Index-Digest": digest, **self.headers}
        if request.method == "GET":
            return httpx.Response(status, json={"index_digest": digest})
        queries = json.loads(request.content)["queries"]
        self.queries.append(queries)
        result = [[{"document": {"id": query, "contents": host}, "score": 1.5}] for query in queries]
        return httpx.Response(status, json={"result": result}, headers=headers)


def client(site: Any, *urls: str, clock: Clock | None = None, **options: Any) -> HttpSearch:
    clock = clock or Clock()
    transport = httpx.MockTransport(site)
    search = HttpSearch(urls or [ONE, TWO], transport=transport, clock=clock, sleep=clock.sleep, **options)
    search.clock = clock  # type: ignore[attr-defined]
    return search


def ask(search: HttpSearch | LocalSearch, *queries: str) -> list[Search]:
    """The outcomes of queries that are asked in the same tick."""
    clock = getattr(search, "clock", None) or Clock()

    async def together() -> list[Search]:
        try:
            return await clock.gather(*map(search.search, queries))
        finally:
            await aclose(search)

    return asyncio.run(together())


def ask_in_turn(search: HttpSearch, *queries: str) -> list[Search]:
    return [outcome for query in queries for outcome in ask(search, query)]


def answers(
    *handlers: Callable[[httpx.Request], httpx.Response],
) -> Callable[[httpx.Request], httpx.Response]:
    """One handler after the other, the last for ever."""
    left = list(handlers)

    def answer(request: httpx.Request) -> httpx.Response:
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    return answer


def status(
    code: int, content: str | bytes = "oops", **headers: str
) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(code, content=content, headers=headers)


def raises(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    def fail(request: httpx.Request) -> httpx.Response:
        raise error

    return fail
