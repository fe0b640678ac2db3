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
from srl.files import is_disk_full
from srl.rollout.delivery import NotDelivered
from srl.train.resume import resume_with
from srl.train.run_directory import LOG

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class RemoteError(Exception):
    """The traceback of an error in another process, shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


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
        return _death(error) or f"a process of the run died: {line}"
    return line if isinstance(error, RayError) else f"{type(error).__name__}: {line}"


def _death(error: RayActorError) -> str:
    """Which process died, by its class, number and machine in Ray's table of actors; "" if it has none."""
    actor = actors(error.actor_id) if error.actor_id and ray.is_initialized() else {}
    if not actor:
        return ""
    name = actor["ActorClassName"].rpartition(".")[2]
    return f"{name} died (process {actor['Pid']} on {actor['Address']['IPAddress']})"


def end_of_run(error: BaseException, run: Path) -> BaseException:
    """The error that `run` ends with, with how to resume it, where one of its processes raised `error`.

    A SrlError if the user or the machines are the cause. Any other error is returned as it was first raised,
    with the traceback of its process as its cause.
    """
    first, resume = root(error), resume_with(run)
    if isinstance(first, NotDelivered):
        return NotDelivered(str(first), hint=resume)
    if isinstance(first, SrlError):
        return first
    if is_disk_full(first, run / LOG):
        return UserError(f"the disk is full: {reason(first)}", hint=f"free some space and {resume}")
    if isinstance(first, RayError):
        return UserError(reason(first), hint=resume)
    first.__cause__ = RemoteError(_COLOURS.sub("", str(error)))
    return first


def failed_episode(error: BaseException, run: Path) -> SrlError:
    """The error that `run` ends with where an episode raised `error`."""
    end = end_of_run(error, run)
    if isinstance(end, SrlError):
        return end
    return UserError(f"an episode failed: {reason(error)}", hint=resume_with(run))
