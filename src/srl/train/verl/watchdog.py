"""While a run on verl goes: its news to the user, and an end to one that no longer goes forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from srl.config import Config
from srl.errors import UserError
from srl.store import RunInfo
from srl.train.report import Reporter, Terminal
from srl.train.resume import resume_with
from srl.train.run_directory import LOG, Progress
from srl.train.verl.failures import ending
from srl.train.verl.log_writer import Event, RunStatus, start_log_actor

if TYPE_CHECKING:
    from omegaconf import DictConfig

EVERY_S = 1.0
"""Seconds between two looks at a run."""
START_S = 900.0
"""Seconds without progress that a run may take, whatever `cluster.watchdog_s` is, until its first episode."""
PATIENCE_S = 60.0
"""Seconds that the log's writer may take to answer, at least."""


class Training(Protocol):
    """verl's trainer, at work in a process of its own."""

    def done(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting for that so long."""
        ...

    def outcome(self) -> None:
        """Raises what it ended with."""
        ...


class Writer(Protocol):
    """The log's writer, as `LogActor` is one."""

    def poll(self) -> RunStatus: ...

    def close(self, status: str) -> Progress: ...


def watch(
    run: Path, config: Config, composed: DictConfig, info: RunInfo, terminal: Terminal,
    reporters: Sequence[Reporter], *, resumed_from: int | None,
) -> Progress:  # fmt: skip
    """Run verl's trainer in a process of its own until it ends, telling what it does.

    Raises UserError where the run cannot go on: what broke, and how to resume it. The log is closed
    whole either way.
    """
    from srl.train.verl.runner import Runner

    trainer = config.trainer
    station = RayWriter(
        start_log_actor(run, run / LOG, info, trainer.sample_freq, trainer.sample_count),
        run, max(PATIENCE_S, config.cluster.watchdog_s),
    )  # fmt: skip
    station.ready()
    if resumed_from is not None:
        station.supersede(resumed_from)

    def begin() -> Training:
        import ray

        runner: Any = ray.remote(num_cpus=1)(Runner).remote()
        return RayTraining(runner.run.remote(composed))

    return followed(begin, station, run, config, terminal, reporters)


def followed(
    begin: Any, station: Writer, run: Path, config: Config, terminal: Terminal, reporters: Sequence[Reporter]
) -> Progress:
    """What `begin` starts, followed to its end; the run's progress, with the log closed.

    Nothing hides the reason for which a run ended: not a log that cannot be closed either.
    """
    status = "failed"
    try:
        training: Training = begin()
        while not _over(training, station, run, config, terminal, reporters):
            pass
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        progress = _closed(station, status)
    return progress


def _over(
    training: Training, station: Writer, run: Path, config: Config, terminal: Terminal,
    reporters: Sequence[Reporter],
) -> bool:  # fmt: skip
    """Whether the training is over, once what happened meanwhile is told."""
    done = training.done(EVERY_S)
    news = station.poll()
    for note in news.notes:
        terminal.note(f"warning: {note}")
    for event in news.events:
        tell(event, config, terminal, reporters)
    if not done:
        _stop_if_stuck(news, config.cluster.watchdog_s, run)
        return False
    try:
        training.outcome()
    except Exception as error:
        end = ending(error, run, news.failure)
        raise end from end.__cause__
    return True


def tell(event: Event, config: Config, terminal: Terminal, reporters: Sequence[Reporter]) -> None:
    """A finished step or evaluation, as the local backend tells it."""
    for reporter in reporters:
        reporter.metrics(event.step, event.metrics)
    if event.phase != "train":
        terminal.evaluation(event.phase, event.step, event.metrics)
        return
    terminal.step(event.step, config.trainer.total_training_steps, event.metrics)
    scored = [(one.trajectory, one.score) for one in event.samples if one.score is not None]
    if scored:
        terminal.samples([one for one, _ in scored], [score for _, score in scored], len(scored))


def _stop_if_stuck(news: RunStatus, limit: float, run: Path) -> None:
    if news.idle_s > (limit if news.started else max(limit, START_S)):
        why = f" ({news.failure})" if news.failure else ""
        raise UserError(
            f"nothing has gone forward for {news.idle_s:.0f} s (cluster.watchdog_s={limit:g}): the run stood "
            f"at {news.where}{why}; {resume_with(run)}"
        )


def _closed(station: Writer, status: str) -> Progress:
    try:
        return station.close(status)
    except Exception:
        if status == "finished":
            raise
        return Progress()


@dataclass(frozen=True, slots=True)
class RayTraining:
    """`Training` as a call of a Ray actor."""

    working: Any

    def done(self, timeout_s: float) -> bool:
        import ray

        return bool(ray.wait([self.working], timeout=timeout_s)[0])

    def outcome(self) -> None:
        import ray

        ray.get(self.working)


@dataclass(slots=True)
class RayWriter:
    """A `LogActor` in another process. Raises UserError where it cannot write, is gone or does not answer.

    It is waited for once: one that was silent for so long is asked again, and no longer waited for.
    """

    actor: Any
    run: Path
    patience_s: float = PATIENCE_S

    def ready(self) -> None:
        self._ask("ready")

    def supersede(self, step: int) -> None:
        self._ask("supersede", step)

    def poll(self) -> RunStatus:
        found: RunStatus = self._ask("poll")
        return found

    def close(self, status: str) -> Progress:
        found: Progress = self._ask("close", status)
        return found

    def _ask(self, name: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=self.patience_s)
        except ray.exceptions.GetTimeoutError:
            waited, self.patience_s = self.patience_s, EVERY_S
            raise UserError(
                f"the log's writer has not answered for {waited:.0f} s; {resume_with(self.run)}"
            ) from None
        except ray.exceptions.RayError as error:
            end = ending(error, self.run)
            raise end from end.__cause__
