"""Runs blocking work in daemon threads, which do not delay the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar, cast

T = TypeVar("T")


class DaemonThreads:
    """At most `size` threads that take work in turn.

    Unlike those of a ThreadPoolExecutor, they are not waited for when the process ends.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._started = 0
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> None:
        """Call `work`, which raises nothing, in a thread."""
        if self._started < self._size:
            Thread(target=self._run, name=f"{self._name}-{self._started}", daemon=True).start()
            self._started += 1
        self._work.put(work)

    def close(self) -> None:
        """End the threads, each after the work that it has."""
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread; returns or raises what it does.

    Unlike a pool's thread, one that is still running does not delay the end of the process.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(found: T | None, error: BaseException | None) -> None:
        if not answer.done():
            answer.set_result((found, error))

    def run() -> None:
        found, error = None, None
        try:
            found = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, found, error)

    Thread(target=run, daemon=True).start()
    found, error = await answer
    if error is not None:
        raise error
    return cast("T", found)
