"""Runs blocking work in a daemon thread, which does not delay the end of the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar, cast

T = TypeVar("T")


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
