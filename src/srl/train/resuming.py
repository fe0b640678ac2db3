"""How to go on with a run that was stopped: what to type, and from which step it then continues."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from srl import interrupts
from srl.files import NotWritten, why_not_written
from srl.manifests import is_checked
from srl.workspace import Workspace

LOG = "log"
"""The directory of a run's log; a run that has one has begun."""


def resume_command(run: Path) -> str:
    """What to type to go on with `run`; the workspace is named unless it is the default one."""
    return Workspace(run.parent.parent).command("train", "--resume", "--run", run.name)


@contextmanager
def resumable(run: Path, how: Callable[[], str]) -> Iterator[None]:
    """Note on the signal or the full disk that ends a run inside `how` to go on with it."""
    try:
        yield
    except BaseException as error:
        stopped = isinstance(error, KeyboardInterrupt | NotWritten) or interrupts.received()
        is_told = resume_command(run) in str(error)
        if (stopped or why_not_written(error)) and not is_told and (run / LOG).is_dir():
            error.add_note(how())
        raise


def how_to_resume(run: Path, step: int) -> str:
    """One line; `step` is that of the newest checkpoint, below 1 where there is none."""
    command = resume_command(run)
    if step > 0:
        return f"go on from step {step} with `{command}`"
    return f"there is no checkpoint yet: `{command}` starts over from step 0"


def unchecked(checkpoint: Path) -> Iterator[str]:
    """What is said of going on from a checkpoint that cannot be checked for damage."""
    if not is_checked(checkpoint):
        yield f"{checkpoint.name} was saved without checksums: it cannot be checked for damage"


def go_on_without(checkpoint: Path) -> str:
    """What to type to go on with a run whose newest checkpoint is damaged."""
    aside = shlex.join(["mv", str(checkpoint), f"{checkpoint}.damaged"])
    return f"to go on without it type: {aside} && {resume_command(checkpoint.parent.parent)}"
