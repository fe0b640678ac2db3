"""The lock of a log, which every process that changes the log holds: one at a time.

    log/lock    exists while the log is locked, and says in JSON by which process, since when and what for,
                and which process launched that one, if it changes the log for another

It is a lock of the operating system on that file, so the kernel releases it when the process ends, however it
ends; a file that a killed process left behind locks nothing. Readers take no lock. On a file system that has
no locks, only the manifest says whether a log is being written (`srl.store.run_info.check_not_written`).
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self
from weakref import WeakValueDictionary

from srl.errors import UserError
from srl.process import Process

LOCK = "lock"


class LogLock:
    """A lock on the log in directory `log`, taken by `acquire` or `with`; `doing` says what for: "pruned".

    `launcher` is the process that this one changes the log for, if it is another (see `left_behind`).
    Locks of one process on one log are one lock, which the last `release` releases, and so does the end of
    the last object that holds it. A forked child does not hold it.
    """

    def __init__(self, log: Path, doing: str, launcher: Process | None = None) -> None:
        self._path, self._doing, self._launcher = log.absolute() / LOCK, doing, launcher
        self._file: _LockedFile | None = None

    def acquire(self) -> None:
        """Take the lock, once; raises UserError that names the process which holds it."""
        if self._file is None or self._file.closed:
            self._file = _lock(self._path, self._doing, self._launcher)

    def release(self) -> None:
        """Give the lock back, if it is held."""
        self._file = None

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def in_use(log: Path, doing: str, process: Process | None, since: str | None) -> UserError:
    """The error for a log that `process` changes; `since` is a time in UTC, as in the manifest."""
    who = "another process" if process is None else str(process)
    when = f" since {datetime.fromisoformat(since):%Y-%m-%d %H:%M:%S} UTC" if since else ""
    return UserError(
        f"{log} is being {doing} by {who}{when}; wait for it to end, or stop it, and repeat the command"
    )


def left_behind(log: Path) -> Process | None:
    """The process that still changes `log` although its launcher has ended; None if there is none."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((log / LOCK).read_bytes())
        process, launcher = Process(**found["process"]), found["launcher"]
        if process.alive and launcher and Process(**launcher).alive is False:
            return process
    return None


class _LockedFile:
    """An open, locked file, removed and closed with its last reference."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    @property
    def closed(self) -> bool:
        return self.descriptor < 0

    def close(self, *, remove: bool) -> None:
        if self.closed:
            return
        with suppress(OSError):
            if remove and self.is_at_its_path():
                os.unlink(self.path)
        os.close(self.descriptor)
        self.descriptor = -1

    def is_at_its_path(self) -> bool:
        """Whether the file was not removed, or replaced, by the process that had the lock before."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self.descriptor), os.stat(self.path))
        return False

    def __del__(self) -> None:
        self.close(remove=True)


_held: WeakValueDictionary[tuple[int, int], _LockedFile] = WeakValueDictionary()
"""The locks of this process, by the device and inode of their files."""


def _lock(path: Path, doing: str, launcher: Process | None) -> _LockedFile:
    while True:
        found = _LockedFile(path, _opened(path))
        stat = os.fstat(found.descriptor)
        key = (stat.st_dev, stat.st_ino)
        if mine := _held.get(key):
            found.close(remove=False)
            return mine
        try:
            fcntl.flock(found.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found.close(remove=False)
            raise _taken(path) from None
        except OSError:  # a file system without locks
            pass
        if found.is_at_its_path():
            _held[key] = found
            _describe(found.descriptor, doing, launcher)
            return found
        found.close(remove=False)


def _opened(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        # a killed process of another user left it behind
        return os.open(path, os.O_RDONLY)


def _describe(descriptor: int, doing: str, launcher: Process | None) -> None:
    """Say in the file who holds it; nobody is kept out by what it says."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    processes = {"process": asdict(Process.here()), "launcher": asdict(launcher) if launcher else None}
    text = json.dumps({"doing": doing, "at": now, **processes})
    with suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _taken(path: Path) -> UserError:
    """The error for a log that another process has locked."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(path.read_bytes())
        process = Process(**found["process"])
        if process.alive is not False:
            return in_use(path.parent, found["doing"], process, found["at"])
    return in_use(path.parent, "changed", None, None)


def _forget() -> None:
    """In a forked child: the lock is its parent's, and ends with it."""
    for found in list(_held.values()):
        found.close(remove=False)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
