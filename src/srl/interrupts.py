"""Handles Ctrl-C, SIGTERM and a closed terminal: the first signal unwinds the command, so that it can clean
up.

All three raise KeyboardInterrupt, which libraries can handle. In an event loop the task is cancelled instead,
and KeyboardInterrupt is raised when it has ended.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from time import sleep
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}
"""The signals that end a command, and the word for each."""
_ONCE_MORE = b"srl: stopping; one more signal ends it at once\n"
_SHOW_CURSOR = b"\x1b[?25h"
_AGAIN_S = 0.01

_received: list[int] = []
_running: asyncio.Task[Any] | None = None
"""The task that `run` waits for in the main thread."""


def received() -> signal.Signals | None:
    """The signal that ends this command, or None."""
    return signal.Signals(_received[0]) if _received else None


@contextmanager
def handled() -> Iterator[None]:
    """Inside, the first of `SIGNALS` raises KeyboardInterrupt, the second prints a note, the third kills.

    Ignored signals, as in a background job or under nohup, stay ignored. Only the main thread has handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {one: signal.getsignal(one) for one in SIGNALS}
    hook, sys.unraisablehook = sys.unraisablehook, _unraisable
    for one, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(one, _on_signal)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        sys.unraisablehook = hook


def run(coroutine: Coroutine[Any, Any, T], runner: asyncio.Runner | None = None) -> T:
    """Run `coroutine` with `asyncio.run` or `runner.run`, and return its result.

    A signal cancels it; when it has ended, KeyboardInterrupt is raised.
    """
    import asyncio

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)
    before = received()
    with nullcontext(runner) if runner else asyncio.Runner() as loop:
        try:
            found = loop.run(_registered(coroutine))
        except asyncio.CancelledError:
            if received() is before:
                raise
    if received() is not before:
        raise KeyboardInterrupt
    return found


async def _registered(coroutine: Coroutine[Any, Any, T]) -> T:
    import asyncio

    global _running
    _running = asyncio.current_task()
    try:
        with _waking(asyncio.get_running_loop()):
            return await coroutine
    finally:
        _running = None


@contextmanager
def _waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, a signal wakes the loop at any moment.

    A signal in the moment before the loop waits, or in another thread, does not interrupt the wait by itself,
    and Python runs its handler only afterwards.
    """
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        loop.add_reader(ours, ours.recv, 4096)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(ours)


def _on_signal(number: int, frame: object) -> None:
    _received.append(number)
    if len(_received) == 1:
        _unwind()
    elif len(_received) == 2:
        with suppress(OSError):
            os.write(2, _ONCE_MORE)
    else:
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR)  # hidden by a progress bar
        os._exit(128 + _received[0])


def forgiven() -> bool:
    """Whether the command goes on: True after one Ctrl-C, which is forgotten, False after other signals."""
    if _received != [signal.SIGINT]:
        return False
    _received.clear()
    return True


def _unwind() -> None:
    if _running is None:
        raise KeyboardInterrupt
    _running.cancel()
    _running.get_loop().call_soon_threadsafe(lambda: None)  # wakes it where a library took the wakeup fd


def _unraisable(found: Any) -> None:
    """Python ignores exceptions in destructors; resend a signal that was raised in one."""
    if not issubclass(found.exc_type, KeyboardInterrupt) or len(_received) != 1:
        sys.__unraisablehook__(found)
        return
    _thread.start_new_thread(_send_again, (_received.pop(),))


def _send_again(number: int) -> None:
    sleep(_AGAIN_S)
    os.kill(os.getpid(), number)
