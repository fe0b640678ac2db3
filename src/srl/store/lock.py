"""The lock of a log, which every process that changes the log holds: one at a time.

It is a lock of the operating system on `log/lock`, so it ends with its process, however that ends; a file
that a killed process left behind locks nothing. The file says for people which process holds it. Readers take
no lock. On a file system without locks only the manifest says whether a log is being written.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from srl.errors import UserError
from srl.process import Process

LOCK = "lock"

_held: dict[tuple[int, Path], IO[str]] = {}
"""The locked files, by process (a forked child does not hold the locks of its parent) and path."""


class LogLock:
    """The lock of the log in directory `log`, taken by `acquire` or `with`.

    A process has one lock on a log: whoever takes it again has it, and the first `release` releases it.
    """

    def __init__(self, log: Path) -> None:
        self._path = log.absolute() / LOCK

    def acquire(self) -> None:
        """Take the lock. Raises UserError, which names the process that holds it."""
        key = (os.getpid(), self._path)
        if key not in _held:
            _held[key] = _locked(self._path)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        if file := _held.pop((os.getpid(), self._path), None):
            self._path.unlink(missing_ok=True)
            file.close()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _locked(path: Path) -> IO[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - open as long as it is locked
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.seek(0)
            holder = file.read() or "another process"
            file.close()
            raise UserError(
                f"{path.parent} is being changed by {holder}", hint="wait for it to end, or stop it"
            ) from error
        except OSError:  # a file system without locks
            pass
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(str(Process.here()))
            file.flush()
            return file
        file.close()  # the process that had the lock removed the file meanwhile
