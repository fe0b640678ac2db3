"""The error that a run on verl ends with, from what one of its processes raised.

A failure travels between processes as the exception itself: what a worker raised arrives with its type, key
and hint, inside what Ray wraps around it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors
from ray.exceptions import RayActorError, RayError, RayTaskError

from srl.errors import SrlError, UserError, first_line, with_notes
from srl.files import is_disk_full
from srl.rollout.delivery import NotDelivered
from srl.train.resume_checks import resume_with

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def root(error: BaseException) -> BaseException:
    """The error that was raised first, in whichever process, without what Ray has wrapped around it.

    Of a process that died it is Ray's, unless its constructor raised one of ours.
    """
    while True:
        inner: object = None
        if isinstance(error, RayTaskError):
            inner = error.cause
        elif isinstance(error, RayActorError):
            inner = error.args[0] if error.args else None
        if not isinstance(inner, BaseException):
            return error
        error = inner


def reason(error: BaseException) -> str:
    """One line for the user about an error in any process."""
    error = root(error)
    if isinstance(error, SrlError):
        return with_notes(error)
    line = _COLOURS.sub("", first_line(error))
    if isinstance(error, RayActorError):
        actor = actors(error.actor_id) if error.actor_id and ray.is_initialized() else {}
        return _died(actor) if actor else f"a process of the run died: {line}"
    return line if isinstance(error, RayError) else f"{type(error).__name__}: {line}"


def dead_process() -> str:
    """A process of this program that has died, as the user is told; "" where none has but by its owner."""
    job = ray.get_runtime_context().get_job_id()
    for actor in actors(actor_state_name="DEAD").values():
        cause = actor["DeathCause"]
        death = cause.actor_died_error_context
        died = death.reason in (death.WORKER_DIED, death.NODE_DIED) or cause.HasField("oom_context")
        if died and actor["JobID"] == job:
            return _died(actor)
    return ""


def _died(actor: dict[str, Any]) -> str:
    """Which process died, as Ray's table of actors has it: class, number and machine."""
    name = actor["ActorClassName"].rpartition(".")[2]
    return f"{name} died (process {actor['Pid']} on {actor['Address']['IPAddress']})"


def end_of_run(error: BaseException, run: Path) -> BaseException:
    """The error that `run` ends with, with how to resume it, where one of its processes raised `error`.

    A SrlError if the user or the machines are the cause. Any other error is returned as it was first raised.
    """
    first, resume = root(error), resume_with(run)
    if isinstance(first, NotDelivered):
        return NotDelivered(str(first), hint=resume)
    if isinstance(first, SrlError):
        return first
    if is_disk_full(first):
        return UserError(f"the disk is full: {reason(first)}", hint=f"free some space and {resume}")
    if isinstance(first, RayError):
        return UserError(reason(first), hint=resume)
    return first
