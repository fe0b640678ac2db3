"""Which search server to ask next: round robin over the healthy ones, a circuit breaker for each.

The circuit breaker is that of Nygard, Release It! (2nd ed., 2018).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Hashable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import monotonic
from typing import Literal

from srl.serve.client.request import Cause, RequestFault

State = Literal["closed", "open", "half-open"]

THRESHOLD = 5
"""Failed requests, with no success between them, that open a breaker."""
FIRST_REST_S = 1.0
LONGEST_REST_S = 5.0
"""The longest time a recovered server stays unused. A trial costs one request."""
TRIAL_S = 1.0
"""Seconds that other requests wait while a trial request runs; a server that has just started is slow."""


class Breaker:
    """The circuit breaker of one server.

    `closed`: requests are sent. A failure to connect, or `THRESHOLD` other failures in a row, opens it.
    `open`: no requests are sent, for `FIRST_REST_S` at first. `half-open`: one trial request may be sent.
    If that succeeds, the breaker closes; if not, it opens for twice the time, up to `LONGEST_REST_S`.
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
        """Seconds until a trial request may be sent; 0 unless open."""
        return max(0.0, self._open_until - self._clock()) if self._open_until is not None else 0.0

    @property
    def admits(self) -> bool:
        """Whether a request may be sent now."""
        return self.state == "closed" or (self.state == "half-open" and not self._trying)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Wraps a request that `admits` allowed; while half-open it is the only one."""
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
        """Record a failure. Repeats of one `request` count once, since that request may be at fault.

        None is for failures that no request can cause, such as a refused connection: one is enough.
        """
        if self.state == "closed":
            self._failures.add(request)
            if request is None or len(self._failures) >= THRESHOLD:
                self._open(FIRST_REST_S)
        elif self.state == "half-open":
            self._open(min(2 * self._rest_s, LONGEST_REST_S))

    def _open(self, rest_s: float) -> None:
        self._rest_s, self._open_until = rest_s, self._clock() + rest_s


class Server:
    """One URL and its recent history."""

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.url = url
        self.breaker = Breaker(clock)
        self.requests = 0
        """Requests in flight."""
        self.last_used = -1
        self.busy_until = 0.0
        self.responds_again = False
        """The health page has answered since the last failure."""
        self.error = ""
        """The last error."""
        self.is_misconfigured = False
        """The last error does not pass by itself: the server is set up for something else."""


class Servers:
    """Spreads requests over the healthy servers: the one with the fewest in flight, in turn.

    A server whose breaker is open is skipped. When it is half-open and others are healthy, `probe` first
    looks in the background whether it responds, and only then a trial request is sent. With no healthy
    server left, the trial request is sent at once.
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
        """The best server that was not tried; None if no server may be asked now.

        A busy server is asked again early only if there is no other.
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
        """Wraps a request to `server` and records its outcome. `request` identifies the request."""
        server.last_used = next(self._turns)
        server.requests += 1
        try:
            with server.breaker.request():
                yield
                server.breaker.succeeded()
        except RequestFault as fault:
            self._record(server, fault, request)
            raise
        finally:
            server.requests -= 1

    @property
    def wait_s(self) -> float:
        """Seconds until a server may be asked; 0 if one may be now, or if waiting cannot help."""
        waits = (one.breaker.wait_s for one in self._servers if not one.is_misconfigured)
        return min(waits, default=0.0)

    def refusal(self) -> RequestFault:
        """Why no server is asked."""
        server = min(self._servers, key=lambda server: (server.is_misconfigured, server.breaker.wait_s))
        if wait_s := server.breaker.wait_s:
            why = f"requests kept failing, so no search server is asked for another {wait_s:.1f} s"
            cause: Cause = "resting" if server.is_misconfigured else "waiting"
            return RequestFault("refused", f"{why}; last error: {server.error}", cause)
        why = "a trial request is on its way to a search server that failed; no other is sent meanwhile"
        return RequestFault("refused", f"{why}; last error: {server.error}", "waiting", TRIAL_S)

    def stop(self) -> None:
        """Cancel the probes of this event loop."""
        for task in self._probes.values():
            if task.get_loop() is asyncio.get_running_loop():
                task.cancel()
        self._probes.clear()

    def _candidates(self) -> list[Server]:
        closed = [server for server in self._servers if server.breaker.state == "closed"]
        half_open = [server for server in self._servers if server not in closed and server.breaker.admits]
        if not closed:
            return half_open
        for server in half_open:
            self._start_probe(server)
        return closed + [server for server in half_open if server.responds_again]

    def _record(self, server: Server, fault: RequestFault, request: int) -> None:
        server.error = str(fault)
        server.is_misconfigured = fault.cause == "setup"
        if fault.cause == "busy":
            server.busy_until = self._clock() + (fault.retry_after_s or 0.0)
        elif fault.cause == "request":
            server.breaker.succeeded()
        else:
            server.responds_again = False
            key = {"link": None, "answer": request}.get(fault.cause, object())
            server.breaker.failed(key)

    def _start_probe(self, server: Server) -> None:
        running = self._probes.get(server)
        alive = running and not running.done() and running.get_loop() is asyncio.get_running_loop()
        if not (alive or server.responds_again):
            self._probes[server] = asyncio.create_task(self._run_probe(server))

    async def _run_probe(self, server: Server) -> None:
        if await self._probe(server):
            server.responds_again = True
        else:
            server.breaker.failed()
