"""Processes of this machine: which one this is, and whether another is still running."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

_ENDED = (b"Z", b"X")
"""States of a main thread that has ended, and whose parent has not waited for it."""
_POLL_S = 0.1


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
        return is_alive(self.pid) and self.since in ("", started(self.pid))

    def wait(self, limit_s: float) -> None:
        """Wait until it has ended, for at most `limit_s` seconds; not at all if it is on another machine."""
        until = time.monotonic() + limit_s
        while self.alive and time.monotonic() < until:
            time.sleep(_POLL_S)

    def __str__(self) -> str:
        """`process 4711`, and the machine if it is another one."""
        return f"process {self.pid}" + ("" if self.host == socket.gethostname() else f" on {self.host}")


def is_alive(pid: int) -> bool:
    """Whether a process of this machine is running; one that was killed and not reaped is not.

    It runs until its last thread has ended: only then are its files closed, and the locks on them free.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return not (stat := _stat(pid)) or not _has_ended(stat)


def started(pid: int) -> str:
    """When a process started, in kernel ticks; empty without /proc, and for one that has ended."""
    stat = _stat(pid)
    return stat[19].decode() if stat and not _has_ended(stat) else ""


def _has_ended(stat: list[bytes]) -> bool:
    """Whether the main thread has ended (its state) and no other one is left (the number of threads)."""
    return stat[0] in _ENDED and int(stat[17]) <= 1


def _stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
