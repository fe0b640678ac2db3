"""The servers that a client knows: which one to ask next, and which to leave alone for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import Literal

from srl.serve.client.request import Cause, RequestFault

TRIAL_S = 1.0
"""How long others wait at a time while one request tries whether a server is back, which is slow at first."""


class Server:
    """One URL and how it has been doing."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.url = url
        self.breaker = Breaker(clock)
        self.requests = 0
        """Requests on their way."""
        self.last_used = -1
        self.busy_until = 0.0
        self.is_back = False
        """Its health page answers again, since it failed."""
        self.error = ""
        """What went wrong last."""
        self.hopeless = False
        """What went wrong last does not pass by itself: it is set up for something else."""


class Servers:
    """Spreads requests over the healthy servers: the one with the fewest on their way, in turn.

    A server whose breaker is open is skipped. When its rest is over and others are healthy, `probe` is
    asked in the background whether it is back; then one request tries it. With no healthy one left a
    request tries it at once.
    """

    def __init__(
        self,
        urls: Sequence[str],
        probe: Callable[[Server], Awaitable[bool]],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._servers = [Server(url, clock) for url in urls]
        self._probe, self._clock = probe, clock
        self._turns = count()
        self._probes: dict[Server, asyncio.Task[None]] = {}

    def pick(self, tried: Container[Server]) -> Server | None:
        """The best server that was not tried; None when there is none that is to be asked now.

        A busy one is asked again before its time only where there is no other.
        """
        candidates = [server for server in self._candidates() if server not in tried]
        ready = [server for server in candidates if self._clock() >= server.busy_until]
        return min(
            ready or (candidates if not tried else []),
            key=lambda server: (server.requests, server.last_used),
            default=None,
        )

    @contextmanager
    def asking(self, server: Server, request: int) -> Iterator[None]:
        """Around a request to `server`; what comes of it is noted. `request` tells requests apart."""
        server.last_used = next(self._turns)
        server.requests += 1
        try:
            with server.breaker.request():
                yield
                server.breaker.succeeded()
        except RequestFault as fault:
            self._note(server, fault, request)
            raise
        finally:
            server.requests -= 1

    @property
    def rest_s(self) -> float:
        """Seconds until a server may be asked again; 0 where one may now, or none ever will be of use."""
        return min((one.breaker.wait_s for one in self._servers if not one.hopeless), default=0.0)

    def refusal(self) -> RequestFault:
        """Why nobody is asked."""
        server = min(self._servers, key=lambda server: (server.hopeless, server.breaker.wait_s))
        if wait_s := server.breaker.wait_s:
            when = f"no search server is asked for another {wait_s:.1f} s, as requests kept failing"
            cause: Cause = "resting" if server.hopeless else "waiting"
            return RequestFault("refused", f"{when}; the last: {server.error}", cause)
        when = "no search server is asked while one request tries whether it is back"
        return RequestFault("refused", f"{when}; the last error: {server.error}", "waiting", TRIAL_S)

    def stop(self) -> None:
        """Ask no more, in this event loop, whether servers are back."""
        for task in self._probes.values():
            if task.get_loop() is asyncio.get_running_loop():
                task.cancel()
        self._probes.clear()

    def _candidates(self) -> list[Server]:
        closed = [server for server in self._servers if server.breaker.state == "closed"]
        rested = [server for server in self._servers if server not in closed and server.breaker.admits]
        if not closed:
            return rested
        for server in rested:
            self._ask_whether_back(server)
        return closed + [server for server in rested if server.is_back]

    def _note(self, server: Server, fault: RequestFault, request: int) -> None:
        server.error = str(fault)
        server.hopeless = fault.cause == "setup"
        if fault.cause == "busy":
            server.busy_until = self._clock() + (fault.retry_after_s or 0.0)
        elif fault.cause == "request":
            server.breaker.succeeded()
        else:
            server.is_back = False
            key = {"link": None, "answer": request}.get(fault.cause, object())
            server.breaker.failed(key)

    def _ask_whether_back(self, server: Server) -> None:
        running = self._probes.get(server)
        alive = running and not running.done() and running.get_loop() is asyncio.get_running_loop()
        if not (alive or server.is_back):
            self._probes[server] = asyncio.create_task(self._look(server))

    async def _look(self, server: Server) -> None:
        if await self._probe(server):
            server.is_back = True
        else:
            server.breaker.failed()


State = Literal["closed", "open", "half-open"]

THRESHOLD = 5
FIRST_REST_S = 1.0
LONGEST_REST_S = 5.0
"""Of a server that is back nobody knows for so long; a try costs one request, of which others are spared."""


class Breaker:
    """Whether one server may be asked.

    `closed`: it may. After a failure that no request can cause, or `THRESHOLD` others with no success
    between them, it is `open`: it may not, for one second at first. Then it is `half-open`: one request
    may try. If that succeeds the breaker closes, else the server rests twice as long as the last time, up
    to `LONGEST_REST_S`.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._failures: set[Hashable] = set()
        self._rest_s = FIRST_REST_S
        self._open_until: float | None = None
        self._trying = False

    @property
    def state(self) -> State:
        if self._open_until is None:
            return "closed"
        return "open" if self.wait_s > 0 else "half-open"

    @property
    def wait_s(self) -> float:
        """Seconds until the server may be tried again; 0 unless open."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    @property
    def admits(self) -> bool:
        """Whether a request may go to the server now."""
        return self.state == "closed" or (self.state == "half-open" and not self._trying)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Around a request that `admits` let through; half-open, nobody else may try meanwhile."""
        trial = self.state == "half-open"
        self._trying = self._trying or trial
        try:
            yield
        finally:
            if trial:
                self._trying = False

    def succeeded(self) -> None:
        self._failures.clear()
        self._rest_s, self._open_until = FIRST_REST_S, None

    def failed(self, request: Hashable | None = None) -> None:
        """A request failed. The same `request` counts once: it may be the request that is at fault.

        None is for what no request can cause, such as a refused connection: that needs no second one.
        """
        if self.state == "closed":
            self._failures.add(request)
            if request is None or len(self._failures) >= THRESHOLD:
                self._open(FIRST_REST_S)
        elif self.state == "half-open":
            self._open(min(2 * self._rest_s, LONGEST_REST_S))

    def _open(self, rest_s: float) -> None:
        self._rest_s, self._open_until = rest_s, self._clock() + rest_s
