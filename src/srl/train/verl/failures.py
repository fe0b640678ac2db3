"""What broke in one of a run's processes, said in one line; and which of them no longer live."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.errors import SrlError, UserError
from srl.files import is_disk_full
from srl.train.resume import resume_with

if TYPE_CHECKING:
    from ray.exceptions import RayActorError

ROLES = {
    "AgentLoopWorker": "rollout worker",
    "TorchServer": "rollout server",
    "HttpServer": "rollout server",
    "LoadBalancer": "balancer of the rollout servers",
    "RewardLoopWorker": "reward worker",
    "LogActor": "log's writer",
    "Runner": "trainer",
    "TransferQueue": "TransferQueue's controller",
    "StorageUnit": "TransferQueue's storage",
    "Worker": "training worker",
}
"""What an actor does, by a part of its class's name; the first that fits."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OURS = re.compile(r"srl\.errors\.\w+: (.+)")
"""The last line of a traceback that ends in an error of ours."""
_FIELD = re.compile(r"^\s*(class_name|pid|ip): (.+)$", re.MULTILINE)
_LESS_MEMORY = (
    "start another run with a lower actor.ppo_max_token_len or cluster.gpu_memory_utilization: "
    "`srl train --backend verl --dry-run` counts what they take"
)
_EVERY_S = 1.0
_ROOM = 1 << 20


class RemoteError(Exception):
    """Where an error came from in another process, for the traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def root(error: BaseException) -> BaseException:
    """What was raised first, in whichever process: what Ray wrapped around it is taken off."""
    from ray.exceptions import RayActorError, RayTaskError

    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, RayActorError) and error.actor_init_failed:
        ours = _OURS.fullmatch(_lines(error)[-1])
        return UserError(ours[1]) if ours else error
    return error


def reason(error: BaseException) -> str:
    """One line for the user about an error of any process."""
    from ray.exceptions import RayActorError, RayError

    error = root(error)
    if isinstance(error, SrlError):
        return str(error)
    if isinstance(error, RayActorError):
        return _dead(error)
    line = first_line(error)
    return line if isinstance(error, RayError) else f"{type(error).__name__}: {line}"


def first_line(error: BaseException) -> str:
    """The first line that an error's text has, without colours."""
    return _lines(error)[0]


def _lines(error: BaseException) -> list[str]:
    lines = [line.strip() for line in _ANSI.sub("", str(error)).splitlines()]
    return [line for line in lines if line] or [type(error).__name__]


def _dead(error: RayActorError) -> str:
    """Which process is gone: what it did, its number and its machine, as far as Ray knows them."""
    if error.actor_init_failed:
        return f"a process of the run could not start: {_lines(error)[-1]}"
    known = dict(_FIELD.findall(str(error)))
    if "class_name" not in known:
        return f"a process of the run died: {first_line(error)}"
    where = [f"process {known['pid']}"] if "pid" in known else []
    where += [f"on {known['ip']}"] if "ip" in known else []
    return f"the {role(known['class_name'])} died" + (f" ({' '.join(where)})" if where else "")


def role(class_name: str) -> str:
    """What an actor of this class does in a run."""
    return next((what for part, what in ROLES.items() if part in class_name), f"process {class_name}")


def ending(error: BaseException, run: Path, told: str = "") -> BaseException:
    """What a run ends with whose trainer raised `error`; `told` is what an episode broke of.

    A UserError where the user or the machines are to blame; else the error as it was raised, with the
    other process's traceback as its cause.
    """
    from ray.exceptions import RayError

    first = root(error)
    if isinstance(first, SrlError):
        return type(first)(str(first))
    if told:
        return UserError(f"{told}; {resume_with(run)}")
    if is_disk_full(first) or not _has_room(run):
        return UserError(f"the disk is full: {reason(first)}; free some space and {resume_with(run)}")
    if isinstance(first, RayError):
        return UserError(f"{reason(first)}; {resume_with(run)}")
    if type(first).__name__ == "OutOfMemoryError":
        return UserError(f"a GPU's memory did not suffice: {first_line(first)}; {_LESS_MEMORY}")
    first.__cause__ = RemoteError(_ANSI.sub("", str(error)))
    return first


def _has_room(folder: Path) -> bool:
    """Whether anything still fits; a library does not always say why a write of its own failed."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free >= _ROOM
    return True


@contextmanager
def ray_starts(address: str | None) -> Iterator[None]:
    """Raises UserError where Ray does not start inside, or the cluster at `address` does not answer."""
    try:
        yield
    except Exception as error:
        what = f"no Ray cluster answers at {address}" if address else "Ray does not start on this machine"
        raise UserError(f"{what}: {first_line(error)}") from error


@dataclass(slots=True)
class Pulse:
    """Which actors are dead.

    Each has one ping under way: a busy one answers late, and Ray answers for a dead one. Asking costs
    nothing but a look at the answers, at most one every `every_s`.
    """

    actors: Mapping[str, Any]
    every_s: float = _EVERY_S
    clock: Callable[[], float] = time.monotonic
    _asked: dict[Any, str] = field(default_factory=dict)
    _next: float = 0.0

    def dead(self) -> str:
        """The first actor found dead, by what it does and where; empty where none is known to be."""
        if self.clock() < self._next:
            return ""
        self._next = self.clock() + self.every_s
        asked = set(self._asked.values())
        for name in [name for name in self.actors if name not in asked]:
            self._ask(name)
        return next(filter(None, map(self._answer, self._answered())), "")

    def _ask(self, name: str) -> None:
        self._asked[self.actors[name].__ray_ready__.remote()] = name

    def _answered(self) -> list[Any]:
        import ray

        pings = list(self._asked)
        return ray.wait(pings, num_returns=len(pings), timeout=0)[0] if pings else []

    def _answer(self, ping: Any) -> str:
        import ray

        name = self._asked.pop(ping)
        try:
            ray.get(ping)
        except ray.exceptions.ActorDiedError as error:
            return reason(error)
        except ray.exceptions.RayError:  # out of reach for a moment
            pass
        self._ask(name)
        return ""
