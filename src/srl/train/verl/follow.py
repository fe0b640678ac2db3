"""Follows a run on verl from the launcher: passes on what it does, and ends it where something broke."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.errors import UserError
from srl.train.report import Reporter, Terminal
from srl.train.resume import resume_with
from srl.train.run_directory import Progress
from srl.train.verl.log_writer import Event, RunStatus

POLL_S = 1.0
"""Seconds between two looks at a run."""


def follow(
    training: Any, log_actor: Any, run: Path, config: Config, terminal: Terminal, also: Sequence[Reporter]
) -> Progress:
    """Follow `training`, Ray's call of the trainer, to its end; the run's progress, with the log closed.

    Raises the error that the run ends with: what failed, and how to resume. An error from closing the log
    never replaces it.
    """
    import ray

    from srl.train.verl.failures import dead_process, end_of_run

    limit, resume = config.cluster.watchdog_s, resume_with(run)

    def log(method: str, *arguments: Any) -> Any:
        """What the log actor answers. Raises UserError where it does not."""
        try:
            return ray.get(getattr(log_actor, method).remote(*arguments), timeout=limit)
        except ray.exceptions.GetTimeoutError:
            what = f"the log writer has not answered for {limit:g} s (cluster.watchdog_s)"
            raise UserError(what, key="cluster.watchdog_s", hint=resume) from None

    try:
        while True:
            finished = bool(ray.wait([training], timeout=POLL_S)[0])
            news: RunStatus = log("poll")
            for note in news.notes:
                terminal.note(f"warning: {note}")
            for event in news.events:
                _report(event, config, terminal, also)
            if news.failure:  # what verl raises follows from it
                raise news.failure
            if finished:
                ray.get(training)
                progress: Progress = log("close", "finished")
                return progress
            if dead := dead_process():
                raise UserError(dead, hint=resume)
            if news.idle_s > limit:
                what = f"no progress for {news.idle_s:.0f} s (cluster.watchdog_s={limit:g})"
                raise UserError(f"{what}; last stage: {news.where}", key="cluster.watchdog_s", hint=resume)
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
