"""A process that changes a log, for the tests of its lock: it is killed, or waits, at a chosen call.

python tests/log_change.py ACTION RUN [OBJECT.NAME before|after kill|wait]

At the first call of `OBJECT.NAME`, such as `srl.store.prune.sweep`, it kills itself with SIGKILL, or prints a
line and waits for the end of its standard input.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

if __name__ != "__main__":
    from tests.store_builder import new_log, run_info, write_step
else:  # verl installs a package `tests` too
    from store_builder import new_log, run_info, write_step

from srl.errors import UserError
from srl.process import Process
from srl.store import LogWriter
from srl.store.lock import LogLock
from srl.store.merge import merge_logs
from srl.store.prune import prune

GONE = {(1, "train"), (2, "train")}


def say(text: object) -> None:
    """Print a line at once: a parent and its child write into one pipe."""
    os.write(1, f"{text}\n".encode())


def finish(run: Path) -> None:
    """Finish a log that was interrupted."""
    new_log(run).finish()


def resume(run: Path) -> None:
    """Resume after step 4, train steps 5 and 6, and finish."""
    log = new_log(run)
    log.drop_steps_after(4)
    for step in (5, 6):
        write_step(log, step, size=3)
    log.finish()


def fork(run: Path) -> None:
    """Write, with a child that has no lock and does not end before the standard input does."""
    log = new_log(run)
    if os.fork() == 0:
        try:
            LogLock(run / "log", "written").acquire()
            say("taken")
        except UserError:
            say("refused")
        sys.stdin.read()
        os._exit(0)
    wait()
    log.finish()


def launch(run: Path) -> None:
    """Launch a child that writes, as a run on verl does; it ends with the standard input."""
    launcher = Process.here()
    if os.fork() == 0:
        with LogWriter(run / "log", run_info(run.name), launcher=launcher):
            say(os.getpid())
            sys.stdin.read()
            os._exit(0)
    os.wait()


ACTIONS = {
    "prune": lambda run: prune(run / "log", GONE),
    "merge": lambda run: merge_logs([run], run.parent / "merged"),
    "finish": finish,
    "resume": resume,
    "fork": fork,
    "launch": launch,
}


def kill() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def wait() -> None:
    """Say that the call is reached, and wait."""
    say("waiting")
    sys.stdin.read()


def stop_at(name: str, when: str, stop: Any) -> None:
    """Call `stop()` before or after each call of `name`."""
    place, _, attribute = name.rpartition(".")
    owner = resolve_name(place)
    whole = getattr(owner, attribute)

    def stopping(*arguments: Any, **options: Any) -> Any:
        if when == "before":
            stop()
        found = whole(*arguments, **options)
        stop()
        return found

    setattr(owner, attribute, stopping)


if __name__ == "__main__":
    action, place, *point = sys.argv[1:]
    if point:
        stop_at(point[0], point[1], {"kill": kill, "wait": wait}[point[2]])
    ACTIONS[action](Path(place))
