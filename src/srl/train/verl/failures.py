"""From an error in one of a run's processes, as Ray raises it, to one line for the user."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from srl.errors import SrlError, UserError, is_out_of_memory, with_notes
from srl.files import is_disk_full
from srl.train.resume import resume_with
from srl.train.run_directory import LOG

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

ROLES = {
    "AgentLoopWorker": "rollout worker",
    "TorchServer": "rollout server",
    "HttpServer": "rollout server",
    "LoadBalancer": "load balancer of the rollout servers",
    "RewardLoopWorker": "reward worker",
    "LogActor": "log writer",
    "Runner": "trainer",
    "TransferQueue": "TransferQueue controller",
    "StorageUnit": "TransferQueue storage",
    "Worker": "training worker",
}
"""The role of an actor, by a part of its class name; the first match counts."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OURS = re.compile(r"srl\.errors\.\w+: (.+)")
"""The last line of a traceback that ends in an error of ours."""
_FIELD = re.compile(r"^[^\S\n]*(class_name|pid|ip): (.+)$", re.MULTILINE)
_LESS_MEMORY = (
    "and add a lower --set actor.ppo_max_token_len=N (of a critic, critic.ppo_max_token_len) or "
    "--set cluster.gpu_memory_utilization=SHARE; "
    "`srl train --backend verl --dry-run` shows the memory they take"
)


STOPPED = "stopped by "
"""How a failure begins that a watch made of a step."""


class RemoteError(Exception):
    """The traceback of an error in another process, shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def root(error: BaseException) -> BaseException:
    """The error that was raised first, in whichever process, without what Ray has wrapped around it."""
    from ray.exceptions import RayActorError, RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError) and error.actor_init_failed:
        ours = _OURS.fullmatch(_lines(error)[-1])
        return UserError(ours[1]) if ours else error
    return error


def reason(error: BaseException) -> str:
    """One line for the user about an error in any process."""
    from ray.exceptions import RayActorError, RayError

    error = root(error)
    if isinstance(error, SrlError):
        return with_notes(error)
    if isinstance(error, RayActorError):
        return _dead(error)
    line = plain_line(error)
    return line if isinstance(error, RayError) else f"{type(error).__name__}: {line}"


def plain_line(error: BaseException) -> str:
    """The first non-empty line of an error's message, without colour codes."""
    return _lines(error)[0]


def _lines(error: BaseException) -> list[str]:
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines()]
    return [line for line in lines if line] or [type(error).__name__]


def _dead(error: RayActorError) -> str:
    """Which process died: its role, number and machine, as far as Ray knows them."""
    if error.actor_init_failed:
        return f"a process of the run could not start: {_lines(error)[-1]}"
    known = dict(_FIELD.findall(str(error)))
    if "class_name" not in known:
        return f"a process of the run died: {plain_line(error)}"
    where = [f"process {known['pid']}"] if "pid" in known else []
    where += [f"on {known['ip']}"] if "ip" in known else []
    return f"the {role(known['class_name'])} died" + (f" ({' '.join(where)})" if where else "")


def role(class_name: str) -> str:
    """The role of an actor of this class in a run."""
    return next((what for part, what in ROLES.items() if part in class_name), f"process {class_name}")


def ended_by(failure: str, run: Path) -> UserError:
    """The error for `failure`, with what to type. A watch would stop a resumed run at the same step again."""
    if failure.startswith(STOPPED):
        return UserError(f"{failure}; start a new run with a lower actor.optim.lr")
    return UserError(f"{failure}; {resume_with(run)}")


def final_error(error: BaseException, run: Path, failure: str = "") -> BaseException:
    """The error to end a run with, whose trainer raised `error`; `failure` is what broke an episode.

    A UserError if the user or the machines are the cause. Any other error is returned as it was first raised,
    with the traceback of its process as its cause.
    """
    from ray.exceptions import RayError

    first = root(error)
    if isinstance(first, SrlError):
        return type(first)(reason(first))
    if failure:
        return ended_by(failure, run)
    if is_disk_full(first, run / LOG):
        hint = f"free some space and {resume_with(run)}"
        return UserError(f"the disk is full: {reason(first)}", hint=hint)
    if isinstance(first, RayError):
        return UserError(f"{reason(first)}; {resume_with(run)}")
    if is_out_of_memory(first):
        return UserError(f"GPU out of memory: {plain_line(first)}; {resume_with(run)} {_LESS_MEMORY}")
    first.__cause__ = RemoteError(_ANSI.sub("", str(error)))
    return first


@contextmanager
def ray_starts(address: str | None) -> Iterator[None]:
    """Raises UserError if Ray does not start in the body, or the cluster at `address` does not answer."""
    try:
        yield
    except Exception as error:
        what = f"no Ray cluster answers at {address}" if address else "Ray does not start on this machine"
        raise UserError(f"{what}: {plain_line(error)}") from error
