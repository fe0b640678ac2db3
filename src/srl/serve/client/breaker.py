"""A circuit breaker: a server that keeps failing is left alone for a while, then tried with one request.

Nygard, Release It! (2nd ed., 2018), "Circuit Breaker".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Literal

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
