"""Limits on requests to the API: a rate, and a spending cap."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable

from srl.index.retriever import Fault


class Rate:
    """Limits requests to `per_second`, evenly spaced; None: no limit. For one event loop."""

    def __init__(
        self,
        per_second: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        self._apart = 1 / per_second if per_second else 0.0
        self._clock, self._sleep = clock, sleep
        self._free = clock()

    async def turn(self) -> None:
        now = self._clock()
        mine = max(now, self._free)
        self._free = mine + self._apart
        if mine > now:
            await self._sleep(mine - now)


class Budget:
    """Counts requests up to a cap; with `ledger`, the requests of all processes that use it.

    Raises Fault: `refused` at the cap, `failed` if the ledger cannot be written, because a request that
    cannot be counted must not be sent.
    """

    def __init__(self, cap: int | None, ledger: sqlite3.Connection | None = None) -> None:
        self._cap, self._ledger = cap, ledger
        self._spent = 0
        if ledger is not None:
            ledger.execute("CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, requests INTEGER)")
            ledger.execute("INSERT OR IGNORE INTO spent VALUES (1, 0)")

    @property
    def spent(self) -> int:
        """Requests counted so far."""
        if self._ledger is None:
            return self._spent
        return int(self._ledger.execute("SELECT requests FROM spent").fetchone()[0])

    def take(self) -> None:
        """Count one request before it is sent. Raises Fault at the cap."""
        if not (self._take_here() if self._ledger is None else self._take_in(self._ledger)):
            raise Fault(
                "refused",
                f"the spending cap of {self._cap:,} requests to the search API is reached; "
                "raise max_requests (or max_cost) to continue",
            )

    def _take_here(self) -> bool:
        if self._cap is not None and self._spent >= self._cap:
            return False
        self._spent += 1
        return True

    def _take_in(self, ledger: sqlite3.Connection) -> bool:
        below = "UPDATE spent SET requests = requests + 1 WHERE ? IS NULL OR requests < ?"
        try:
            return ledger.execute(below, (self._cap, self._cap)).rowcount == 1
        except sqlite3.Error as error:
            raise Fault("failed", f"the ledger of requests cannot be written: {error}") from error
