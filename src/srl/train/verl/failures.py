"""The error that a run on verl ends with, from what one of its processes raised.

A failure travels between processes as the exception itself: what a worker raised arrives with its type, key
and hint, inside what Ray wraps around it.
"""

from __future__ import annotations

import re
from pathlib import Path

import ray
from ray._private.state import actors
from ray.exceptions import RayActorError, RayError, RayTaskError

from srl.errors import SrlError, UserError, first_line, with_notes
from srl.rollout.delivery import NotDelivered
from srl.train.resume import resume_with

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
        return dead_process() or f"a process of the run died: {line}"
    return line if isinstance(error, RayError) else f"{type(error).__name__}: {line}"


def dead_process() -> str:
    """Which process of this program has died: class, number and machine; "" where none has but by its owner.

    From Ray's private table. verl does not wait for its rollout workers, so nothing else tells of one.
    """
    job = ray.get_runtime_context().get_job_id() if ray.is_initialized() else ""
    for actor in actors(actor_state_name="DEAD").values() if job else ():
        cause = actor["DeathCause"]
        death = cause.actor_died_error_context
        died = death.reason in (death.WORKER_DIED, death.NODE_DIED) or cause.HasField("oom_context")
        if died and actor["JobID"] == job:
            name = actor["ActorClassName"].rpartition(".")[2]
            return f"{name} died (process {actor['Pid']} on {actor['Address']['IPAddress']})"
    return ""


def end_of_run(error: BaseException, run: Path) -> BaseException:
    """The error that `run` ends with, where one of its processes raised `error`: as it was first raised, and
    a UserError where a process or its machine is the cause."""
    first = root(error)
    if isinstance(first, RayError):
        return UserError(reason(first), hint=resume_with(run))
    if isinstance(first, NotDelivered):
        first.add_note(resume_with(run))
    return first
