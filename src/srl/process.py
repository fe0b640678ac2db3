"""Signals, threads and processes: a command ends at once and cleanly, whatever it is doing.

Ctrl-C, SIGTERM and a closed terminal raise KeyboardInterrupt, so that the command can clean up; in an event
loop the task is cancelled instead, and KeyboardInterrupt is raised when it has ended. Blocking work runs in
daemon threads, which do not delay the end of the process.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

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

_received: list[int] = []
_running: asyncio.Task[Any] | None = None
"""The task that `run_async` waits for in the main thread."""


def signal_received() -> signal.Signals | None:
    """The signal that ends this command, or None."""
    return signal.Signals(_received[0]) if _received else None


def forget_interrupt() -> bool:
    """Forget a single Ctrl-C, so that the command goes on; False after other signals, which end it."""
    if _received != [signal.SIGINT]:
        return False
    _received.clear()
    return True


@contextmanager
def signals_handled() -> Iterator[None]:
    """Inside, the first of `SIGNALS` raises KeyboardInterrupt, the second prints a note, the third kills.

    Ignored signals, as in a background job or under nohup, stay ignored. Only the main thread has handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _received.clear()
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _on_signal(number: int, frame: object) -> None:
    _received.append(number)
    if len(_received) == 1:
        if _running is None:
            raise KeyboardInterrupt
        _running.cancel()
        _running.get_loop().call_soon_threadsafe(lambda: None)  # wakes it where a library took the wakeup fd
    elif len(_received) == 2:
        with suppress(OSError):
            os.write(2, _ONCE_MORE)
    else:
        os._exit(128 + _received[0])


def run_async(coroutine: Coroutine[Any, Any, T], runner: asyncio.Runner | None = None) -> T:
    """Run `coroutine` with `asyncio.run` or `runner.run`, and return its result.

    A signal cancels it; when it has ended, KeyboardInterrupt is raised.
    """
    import asyncio

    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(coroutine)

    async def registered() -> T:
        global _running
        _running = asyncio.current_task()
        try:
            with _waking(asyncio.get_running_loop()):
                return await coroutine
        finally:
            _running = None

    before = signal_received()
    with nullcontext(runner) if runner else asyncio.Runner() as loop:
        try:
            result = loop.run(registered())
        except asyncio.CancelledError:
            if signal_received() is before:
                raise
    if signal_received() is not before:
        raise KeyboardInterrupt
    return result


@contextmanager
def _waking(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Inside, a signal wakes the loop at any moment.

    A signal in the moment before the loop waits, or in another thread, does not interrupt the wait by itself,
    and Python runs its handler only afterwards.
    """
    reading_end, writing_end = socket.socketpair()
    with reading_end, writing_end:
        reading_end.setblocking(False)
        writing_end.setblocking(False)
        loop.add_reader(reading_end, reading_end.recv, 4096)
        before = signal.set_wakeup_fd(writing_end.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            loop.remove_reader(reading_end)


async def in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread; returns or raises what it does."""
    import asyncio

    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[T | None, BaseException | None]] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True).start()
    result, error = await outcome
    if error is not None:
        raise error
    return cast("T", result)


class DaemonThreads:
    """At most `size` daemon threads that take work in turn."""

    def __init__(self, size: int, name: str) -> None:
        self._size, self._name = size, name
        self._started = 0
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()

    def submit(self, work: Callable[[], object]) -> None:
        """Call `work`, which raises nothing, in a thread."""
        if self._started < self._size:
            name = f"{self._name}-{self._started}"
            threading.Thread(target=self._run, name=name, daemon=True).start()
            self._started += 1
        self._work.put(work)

    def close(self) -> None:
        """End the threads, each after the work that it has."""
        for _ in range(self._started):
            self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `since` (its start, in kernel ticks) distinguishes it from a later one with the same id."""

    host: str
    pid: int
    since: str

    @classmethod
    def here(cls) -> Process:
        """This process."""
        return cls(socket.gethostname(), os.getpid(), started(os.getpid()))

    @property
    def alive(self) -> bool | None:
        """Whether it is still running; None if it is on another machine."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return self.since == started(self.pid)

    def __str__(self) -> str:
        """`process 4711`, and the machine if it is another one."""
        return f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" on {self.host}")


def started(pid: int) -> str:
    """When a process started, in kernel ticks; empty without /proc, and for one that has ended.

    It runs until its last thread has ended: only then are its files closed, and the locks on them free.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    has_ended = stat[0] in (b"Z", b"X") and int(stat[17]) <= 1
    return "" if has_ended else stat[19].decode()
