"""Follows a run on verl from the launcher: passes on what it does, and ends it where it makes no progress."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.errors import SrlError, UserError
from srl.train.report import Reporter, Terminal
from srl.train.resume import resume_with
from srl.train.run_directory import Progress
from srl.train.verl.log_writer import Event, RunStatus

POLL_S = 1.0
"""Seconds between two looks at a run."""
START_S = 900.0
"""Shortest limit without progress, in seconds, until the first episode: workers are loading models."""
PATIENCE_S = 60.0
"""Shortest wait for an answer of the log writer, in seconds."""


@dataclass(frozen=True, slots=True)
class RayTraining:
    """verl's trainer: a call of its process."""

    call: Any

    def done(self, timeout_s: float) -> bool:
        """Whether it has ended, after waiting for up to `timeout_s` seconds."""
        import ray

        return bool(ray.wait([self.call], timeout=timeout_s)[0])

    def outcome(self) -> None:
        """Raises the error that it ended with, if any."""
        import ray

        ray.get(self.call)


@dataclass(slots=True)
class RayLog:
    """A `LogActor` in another process. Raises the error that ends the run if it fails, has died or does not
    answer in time; after that, later questions are given `POLL_S` seconds only."""

    actor: Any
    run: Path
    patience_s: float

    def ask(self, name: str, *arguments: Any) -> Any:
        import ray

        from srl.train.verl.failures import end_of_run

        try:
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=self.patience_s)
        except ray.exceptions.GetTimeoutError:
            waited, self.patience_s = self.patience_s, POLL_S
            what = f"the log writer has not answered for {waited:.0f} s"
            raise UserError(what, hint=resume_with(self.run)) from None
        except ray.exceptions.RayError as error:
            end = end_of_run(error, self.run)
            raise end from end.__cause__


def follow(
    training: RayTraining, log: RayLog, run: Path, config: Config, terminal: Terminal,
    also: Sequence[Reporter],
) -> Progress:  # fmt: skip
    """Follow the training to its end; the run's progress, with the log closed.

    Raises the error that the run ends with: what failed, and how to resume. An error from closing the log
    never replaces it.
    """
    from srl.train.verl.failures import end_of_run, root

    try:
        finished = False
        while not finished:
            finished = training.done(POLL_S)
            news: RunStatus = log.ask("poll")
            for note in news.notes:
                terminal.note(f"warning: {note}")
            for event in news.events:
                _report(event, config, terminal, also)
            if not finished:
                _check_progress(news, config.cluster.watchdog_s, run)
        try:
            training.outcome()
        except Exception as error:
            end = end_of_run(error, run)
            if news.failure and not isinstance(root(error), SrlError):  # verl's error follows from it
                end = news.failure
            raise end from end.__cause__
    except BaseException as error:
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        with suppress(Exception):
            log.ask("close", status, str(error))
        raise
    progress: Progress = log.ask("close", "finished")
    return progress


def _check_progress(news: RunStatus, limit: float, run: Path) -> None:
    """Raises UserError after `limit` seconds without progress, of a run that starts after `START_S`."""
    if news.idle_s > (limit if news.started else max(limit, START_S)):
        why = f" ({news.failure})" if news.failure else ""
        what = f"no progress for {news.idle_s:.0f} s (cluster.watchdog_s={limit:g}); last stage: {news.where}"
        raise UserError(f"{what}{why}", key="cluster.watchdog_s", hint=resume_with(run))


def _report(event: Event, config: Config, terminal: Terminal, also: Sequence[Reporter]) -> None:
    """Report a finished step or evaluation, as the local backend does."""
    for reporter in also:
        reporter.metrics(event.step, event.metrics)
    if event.phase != "train":
        terminal.evaluation(event.phase, event.step, event.metrics)
        return
    terminal.step(event.step, config, event.metrics)
    scored = [(record.trajectory, record.score) for record in event.samples if record.score is not None]
    if scored:
        trajectories, scores = zip(*scored, strict=True)
        terminal.samples(trajectories, scores, len(scored))
