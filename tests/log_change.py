"""Changes a log in a process of its own, which waits in the middle: for the tests of two processes.

    python tests/log_change.py ACTION RUN [OBJECT.NAME]

At the first call of `OBJECT.NAME`, such as `srl.store.writer.merge_parts`, it prints a line and waits until
its standard input ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

if __name__ != "__main__":
    from tests.store_builder import new_log, run_info, write_step
else:  # verl installs a package `tests` too
    from store_builder import new_log, run_info, write_step

from srl.process import Process
from srl.store import LogWriter


def say(text: object) -> None:
    """Print a line at once: a parent and its child write into one pipe."""
    os.write(1, f"{text}\n".encode())


def resume(run: Path) -> None:
    """Resume after step 4, train steps 5 and 6, and finish."""
    log = new_log(run)
    log.drop_steps_after(4)
    for step in (5, 6):
        write_step(log, step, size=3)
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


ACTIONS: dict[str, Callable[[Path], None]] = {"resume": resume, "launch": launch}


def wait() -> None:
    """Say that the call is reached, and wait."""
    say("waiting")
    sys.stdin.read()


def wait_at(name: str) -> None:
    """Wait before each call of `name`."""
    place, _, attribute = name.rpartition(".")
    whole = getattr(resolve_name(place), attribute)

    def waiting(*arguments: Any, **options: Any) -> Any:
        wait()
        return whole(*arguments, **options)

    setattr(resolve_name(place), attribute, waiting)


if __name__ == "__main__":
    action, place, *point = sys.argv[1:]
    if point:
        wait_at(*point)
    ACTIONS[action](Path(place))
