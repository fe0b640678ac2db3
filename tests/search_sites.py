"""Search servers that are none, by host, and a clock that does what it is told."""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Awaitable, Callable

import httpx

from srl.serve import HttpSearch
from srl.trajectory import Search

ONE, TWO = "http://one/retrieve", "http://two/retrieve"


class Clock:
    """Time that passes only when somebody sleeps, or not even then."""

    def __init__(self, stands: bool = False) -> None:
        self.now = 100.0
        self.stands = stands
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += 0.0 if self.stands else seconds
        await asyncio.sleep(0)


class Later(Clock):
    """Time that passes for all sleepers at once: on to the next to wake, whenever nothing else happens."""

    def __init__(self) -> None:
        super().__init__()
        self._asleep: list[tuple[float, int, asyncio.Future[None]]] = []

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
    """Servers by host: each has a status, and headers of its answers; who was asked is kept."""

    def __init__(self, **statuses: int | type[Exception]) -> None:
        self.statuses = dict(statuses)
        self.headers: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.asked: list[str] = []
        self.probed: list[str] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        (self.probed if request.url.path == "/health" else self.asked).append(host)
        status = self.statuses[host]
        if not isinstance(status, int):
            raise status("no luck", request=request)
        headers = {"X-Index-Digest": self.digests.get(host, "d1"), **self.headers}
        if request.url.path == "/health":
            return httpx.Response(status, json={"index_digest": headers["X-Index-Digest"]})
        queries = json.loads(request.content)["queries"]
        found = [[{"document": {"id": query, "contents": host}, "score": 1.0}] for query in queries]
        return httpx.Response(status, json={"result": found}, headers=headers)


def client(site: Callable, *urls: str, clock: Clock | None = None, **options: object) -> HttpSearch:
    clock = clock or Clock()
    return HttpSearch(
        urls or [ONE, TWO], transport=httpx.MockTransport(site), clock=clock, sleep=clock.sleep, **options
    )


def run(*calls: Callable[[], Awaitable[object]]) -> list:
    """The calls one after the other, in one event loop, with time for what runs in the background."""

    async def in_turn() -> list:
        found = []
        for call in calls:
            found.append(await call())
            for _ in range(20):
                await asyncio.sleep(0)
        return found

    return asyncio.run(in_turn())


def ask(search: HttpSearch, *queries: str) -> list[Search]:
    return run(*(lambda query=query: search.search(query) for query in queries))
