"""Rewards that are not `async`, called in a thread so that a slow one delays no episode."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

from srl.process import in_thread
from srl.trajectory import Score, Trajectory


@dataclass(slots=True, eq=False)
class _Call:
    """Trajectories waiting for their scores; then their scores or an error."""

    trajectories: list[Trajectory]
    scores: list[Score] | None = None
    error: Exception | None = None

    @property
    def settled(self) -> bool:
        return self.scores is not None or self.error is not None


class SyncReward:
    """Calls `score` of a plugin that is not `async`, from one thread at a time.

    Requests that arrive during a call are scored together in the next one, in order of arrival. `check`
    raises if the scores do not fit their trajectories. Used by one event loop at a time; a later loop may
    use it again.
    """

    def __init__(
        self,
        score: Callable[[list[Trajectory]], list[Score] | Awaitable[list[Score]]],
        check: Callable[[list[Trajectory], Any], None],
    ) -> None:
        self._score, self._check = score, check
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: list[_Call] = []
        self._turn = asyncio.Lock()
        self._one_thread = Lock()

    async def score(self, trajectories: list[Trajectory]) -> list[Score]:
        """One score for each trajectory, in order. Raises what the plugin raises."""
        call, (waiting, turn) = _Call(trajectories), self._of_loop()
        waiting.append(call)
        try:
            async with turn:
                if not call.settled:
                    await self._answer([unsettled for unsettled in waiting if not unsettled.settled])
        finally:
            waiting.remove(call)
        if call.error is not None:
            raise call.error
        assert call.scores is not None, "a settled call has scores or an error"
        return call.scores

    def _of_loop(self) -> tuple[list[_Call], asyncio.Lock]:
        """The calls that wait in the running event loop, and the lock of its call of the plugin."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._waiting, self._turn = loop, [], asyncio.Lock()
        return self._waiting, self._turn

    async def _answer(self, calls: list[_Call]) -> None:
        """Score the trajectories of all `calls` with one call of the plugin."""
        batch = [trajectory for call in calls for trajectory in call.trajectories]
        try:
            scores = await in_thread(lambda: self._in_turn(batch))
            if inspect.isawaitable(scores):
                scores = await scores
            self._check(batch, scores)
        except Exception as error:
            for call in calls:
                call.error = error
            return
        remaining = iter(scores)
        for call in calls:
            call.scores = [next(remaining) for _ in call.trajectories]

    def _in_turn(self, batch: list[Trajectory]) -> list[Score] | Awaitable[list[Score]]:
        """Runs in a thread. The lock waits for a call that a cancelled request has left running."""
        with self._one_thread:
            return self._score(list(batch))
