"""The watchdog of a run on verl: passes on what it does, and ends it when it makes no progress or breaks.

`watch` runs in the launcher. `ActorHealth` runs in the trainer's process and finds actors that have died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from srl.config import Config
from srl.errors import UserError
from srl.train.report import Reporter, Terminal
from srl.train.resume import resume_with
from srl.train.run_directory import Progress
from srl.train.verl.failures import final_error, reason
from srl.train.verl.log_writer import Event, RunStatus

POLL_S = 1.0
"""Seconds between two looks at a run."""
START_S = 900.0
"""Shortest limit without progress, in seconds, until the first episode: workers are loading models."""
PATIENCE_S = 60.0
"""Shortest wait for an answer of the log writer, in seconds."""


class Training(Protocol):
    """verl's trainer, running in a process of its own."""

    def done(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting for up to `timeout_s` seconds."""
        ...

    def outcome(self) -> None:
        """Raises the error that it ended with, if any."""
        ...


class Writer(Protocol):
    """The run's log writer, such as `LogActor`."""

    def poll(self) -> RunStatus: ...

    def close(self, status: str, error: str = "") -> Progress: ...


def watch(
    begin: Callable[[], Training], writer: Writer, run: Path, config: Config, terminal: Terminal,
    reporters: Sequence[Reporter],
) -> Progress:  # fmt: skip
    """Start the training by `begin` and follow it to its end; the run's progress, with the log closed.

    Raises UserError if the run cannot go on: what failed, and how to resume. An error from closing the log
    never replaces the error that ended the run.
    """
    status, why = "failed", ""
    try:
        training = begin()
        while not _is_over(training, writer, run, config, terminal, reporters):
            pass
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        why = str(error)
        raise
    finally:
        progress = _closed(writer, status, why)
    return progress


def _is_over(
    training: Training, writer: Writer, run: Path, config: Config, terminal: Terminal,
    reporters: Sequence[Reporter],
) -> bool:  # fmt: skip
    """Whether the training has ended. What happened since the last look is reported first."""
    done = training.done(POLL_S)
    status = writer.poll()
    for note in status.notes:
        terminal.note(f"warning: {note}")
    for event in status.events:
        _report(event, config, terminal, reporters)
    if not done:
        _stop_if_stuck(status, config.cluster.watchdog_s, run)
        return False
    try:
        training.outcome()
    except Exception as error:
        final = final_error(error, run, status.failure)
        raise final from final.__cause__
    return True


def _report(event: Event, config: Config, terminal: Terminal, reporters: Sequence[Reporter]) -> None:
    """Report a finished step or evaluation, as the local backend does."""
    for reporter in reporters:
        reporter.metrics(event.step, event.metrics)
    if event.phase != "train":
        terminal.evaluation(event.phase, event.step, event.metrics)
        return
    terminal.step(event.step, config, event.metrics)
    scored = [(one.trajectory, one.score) for one in event.samples if one.score is not None]
    if scored:
        terminal.samples([one for one, _ in scored], [score for _, score in scored], len(scored))


def _stop_if_stuck(status: RunStatus, limit: float, run: Path) -> None:
    if status.idle_s > (limit if status.started else max(limit, START_S)):
        why = f" ({status.failure})" if status.failure else ""
        raise UserError(
            f"no progress for {status.idle_s:.0f} s (cluster.watchdog_s={limit:g}); last stage: "
            f"{status.where}{why}; {resume_with(run)}"
        )


def _closed(writer: Writer, status: str, why: str) -> Progress:
    try:
        return writer.close(status, why)
    except Exception:
        if status == "finished":
            raise
        return Progress()


@dataclass(frozen=True, slots=True)
class RayTraining:
    """`Training` as a call of a Ray actor."""

    call: Any

    def done(self, timeout_s: float) -> bool:
        import ray

        return bool(ray.wait([self.call], timeout=timeout_s)[0])

    def outcome(self) -> None:
        import ray

        ray.get(self.call)


@dataclass(slots=True)
class RayWriter:
    """A `LogActor` in another process. Raises UserError if it fails, has died or does not answer in time.

    After the first time-out, later questions are given `POLL_S` seconds only.
    """

    actor: Any
    run: Path
    patience_s: float = PATIENCE_S

    def ready(self) -> None:
        self._ask("ready")

    def drop_steps_after(self, step: int) -> None:
        self._ask("drop_steps_after", step)

    def poll(self) -> RunStatus:
        found: RunStatus = self._ask("poll")
        return found

    def close(self, status: str, error: str = "") -> Progress:
        found: Progress = self._ask("close", status, error)
        return found

    def _ask(self, name: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=self.patience_s)
        except ray.exceptions.GetTimeoutError:
            waited, self.patience_s = self.patience_s, POLL_S
            raise UserError(
                f"the log writer has not answered for {waited:.0f} s; {resume_with(self.run)}"
            ) from None
        except ray.exceptions.RayError as error:
            final = final_error(error, self.run)
            raise final from final.__cause__


@dataclass(slots=True)
class ActorHealth:
    """Which Ray actors have died.

    Each has one ping under way: a busy actor answers late, and Ray answers for a dead one. `dead` never
    waits, and looks at the answers at most once every `every_s` seconds.
    """

    actors: Mapping[str, Any]
    every_s: float = POLL_S
    clock: Callable[[], float] = time.monotonic
    _pings: dict[Any, str] = field(default_factory=dict)
    _next: float = 0.0

    def dead(self) -> str:
        """The first actor found dead, by its role and machine; empty if none is known to be."""
        if self.clock() < self._next:
            return ""
        self._next = self.clock() + self.every_s
        pinged = set(self._pings.values())
        for name in [name for name in self.actors if name not in pinged]:
            self._ping(name)
        return next(filter(None, map(self._answer, self._answered())), "")

    def _ping(self, name: str) -> None:
        self._pings[self.actors[name].__ray_ready__.remote()] = name

    def _answered(self) -> list[Any]:
        import ray

        pings = list(self._pings)
        return ray.wait(pings, num_returns=len(pings), timeout=0)[0] if pings else []

    def _answer(self, ping: Any) -> str:
        import ray

        name = self._pings.pop(ping)
        try:
            ray.get(ping)
        except ray.exceptions.ActorDiedError as error:
            return reason(error)
        except ray.exceptions.RayError:  # not reachable for the moment
            pass
        self._ping(name)
        return ""
