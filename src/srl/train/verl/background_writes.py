"""Writes to the log beside training: the disk is not waited for, order and errors are kept.

A process that is killed may lose what is queued. So what a checkpoint relies on is waited for before it is
saved: a resumed run drops the steps after its checkpoint, and every earlier one is in the log.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class BackgroundWrites:
    """Runs calls in order in a thread of its own.

    After a call that fails no other is run, and every later method but `close` raises its error.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._error: Exception | None = None

    def do(self, call: Callable[..., object], *arguments: object) -> None:
        """Queue a call; returns at once."""
        self.check()
        self._thread.submit(self._make, call, arguments)

    def check(self) -> None:
        """Raises the error of a failed call."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all calls have run. Raises the error of a failed one."""
        self._thread.submit(lambda: None).result()
        self.check()

    def close(self) -> None:
        """Wait until all calls have run, and end the thread."""
        self._thread.shutdown()

    def _make(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        if self._error is not None:
            return
        try:
            call(*arguments)
        except Exception as error:
            self._error = error
