"""Follows a run on verl from the launcher: passes on what it does, and ends it where something broke."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.errors import SrlError, UserError
from srl.train.report import Reporter, Terminal
from srl.train.resume_checks import resume_with
from srl.train.run_directory import Progress
from srl.train.verl.log_writer import Event, RunStatus

POLL_S = 1.0
"""Seconds between two looks at a run."""
START_S = 900.0
"""Shortest limit without progress, in seconds, until the first episode: workers are loading models."""
PATIENCE_S = 60.0
"""Shortest wait for an answer of the log actor, in seconds."""


def ask(log_actor: Any, run: Path, patience_s: float, name: str, *arguments: Any) -> Any:
    """What the log actor answers. Raises UserError where it does not."""
    import ray

    try:
        return ray.get(getattr(log_actor, name).remote(*arguments), timeout=patience_s)
    except ray.exceptions.GetTimeoutError:
        what = f"the log writer has not answered for {patience_s:.0f} s"
        raise UserError(what, hint=resume_with(run)) from None


def follow(
    training: Any, log_actor: Any, run: Path, config: Config, terminal: Terminal, also: Sequence[Reporter]
) -> Progress:
    """Follow `training`, Ray's call of the trainer, to its end; the run's progress, with the log closed.

    Raises the error that the run ends with: what failed, and how to resume. An error from closing the log
    never replaces it.
    """
    import ray

    from srl.train.verl.failures import dead_process, end_of_run, root

    limit = config.cluster.watchdog_s
    log = partial(ask, log_actor, run, max(PATIENCE_S, limit))
    try:
        finished = False
        while not finished:
            finished = bool(ray.wait([training], timeout=POLL_S)[0])
            news: RunStatus = log("poll")
            for note in news.notes:
                terminal.note(f"warning: {note}")
            for event in news.events:
                _report(event, config, terminal, also)
            if finished:
                try:
                    ray.get(training)
                except Exception as error:
                    if news.failure and not isinstance(root(error), SrlError):  # verl's follows from it
                        raise news.failure from error
                    raise
            elif news.failure:
                raise news.failure
            elif dead := dead_process():
                raise UserError(dead, hint=resume_with(run))
            elif news.idle_s > (limit if news.started else max(limit, START_S)):
                what = f"no progress for {news.idle_s:.0f} s (cluster.watchdog_s={limit:g})"
                key, hint = "cluster.watchdog_s", resume_with(run)
                raise UserError(f"{what}; last stage: {news.where}", key=key, hint=hint)
        progress: Progress = log("close", "finished")
        return progress
    except BaseException as error:
        end = end_of_run(error, run) if isinstance(error, Exception) else error
        with suppress(Exception):
            status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            log("close", status, str(end))
        if end is error:
            raise
        raise end from error


def _report(event: Event, config: Config, terminal: Terminal, also: Sequence[Reporter]) -> None:
    """Report a finished step or evaluation, as the local backend does."""
    for reporter in also:
        reporter.metrics(event.step, event.metrics)
    if event.phase != "train":
        terminal.evaluation(event.phase, event.step, event.metrics)
        return
    terminal.step(event.step, config, event.metrics)
