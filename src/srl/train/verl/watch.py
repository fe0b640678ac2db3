"""While a run on verl goes: its news to the user, and an end to one that no longer goes forward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.errors import UserError
from srl.store import RunInfo
from srl.train.checkpoint import Progress
from srl.train.report import Reporter, Terminal
from srl.train.verl.station import Event, News, start_station

if TYPE_CHECKING:
    from omegaconf import DictConfig

EVERY_S = 1.0
"""Seconds between two looks at a run."""
PATIENCE_S = 60.0
"""Seconds that the log's writer may take to answer."""


def watch(
    run: Path, config: Config, composed: DictConfig, info: RunInfo, terminal: Terminal,
    reporters: Sequence[Reporter], *, resumed: bool,
) -> Progress:  # fmt: skip
    """Run verl's trainer in a process of its own until it ends, telling what it does.

    Raises UserError where the run cannot go on: what broke, and how to go on with it. The log is closed
    whole either way.
    """
    import ray

    from srl.train.verl.runner import Runner

    trainer = config.trainer
    station = start_station(run, info, trainer.sample_freq, trainer.sample_count)
    _ask(station.ready, run)
    status = "failed"
    try:
        if resumed:
            _ask(station.supersede, run, latest_step(run))
        working = ray.remote(num_cpus=1)(Runner).remote().run.remote(composed)
        while True:
            done, _ = ray.wait([working], timeout=EVERY_S)
            news: News = _ask(station.news, run)
            for event in news.events:
                tell(event, config, terminal, reporters)
            if done:
                _outcome(working, run)
                break
            _stop_if_stuck(news, config, run)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        progress = _closed(station, status, run)
    return progress


def tell(event: Event, config: Config, terminal: Terminal, reporters: Sequence[Reporter]) -> None:
    """A finished step or evaluation, as the local engine tells it."""
    for reporter in reporters:
        reporter.metrics(event.step, event.metrics)
    if event.phase != "train":
        terminal.evaluation(event.phase, event.step, event.metrics)
        return
    terminal.step(event.step, config.trainer.total_training_steps, event.metrics)
    scored = [(one.trajectory, one.score) for one in event.samples if one.score is not None]
    if scored:
        terminal.samples([one for one, _ in scored], [score for _, score in scored], len(scored))


def latest_step(run: Path) -> int:
    """The step of verl's newest whole checkpoint, −1 where there is none."""
    marker = run / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(marker.read_text(encoding="utf-8")) if marker.is_file() else -1


def _stop_if_stuck(news: News, config: Config, run: Path) -> None:
    limit = config.cluster.watchdog_s
    if news.idle_s > limit:
        raise UserError(
            f"nothing has gone forward for {news.idle_s:.0f} s, more than cluster.watchdog_s={limit:g}; it "
            f"stood at {news.where}. {_go_on(run)}"
        )


def _outcome(working: Any, run: Path) -> None:
    """Raises what the trainer's process raised, as the user can read it."""
    import ray

    try:
        ray.get(working)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        while isinstance(cause, ray.exceptions.RayTaskError):
            cause = cause.cause
        if isinstance(cause, UserError):
            raise UserError(str(cause)) from None
        if isinstance(cause, ray.exceptions.RayActorError):
            raise UserError(f"a worker of the run died: {_first(cause)}. {_go_on(run)}") from error
        raise
    except ray.exceptions.RayActorError as error:
        raise UserError(f"the trainer's process died: {_first(error)}. {_go_on(run)}") from error


def _ask(method: Any, run: Path, *arguments: Any) -> Any:
    """What the log's writer answers. Raises UserError where it cannot write, or is gone."""
    import ray

    try:
        return ray.get(method.remote(*arguments), timeout=PATIENCE_S)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise UserError(f"the log's writer does not answer: {_first(error)}. {_go_on(run)}") from error


def _closed(station: Any, status: str, run: Path) -> Progress:
    """The run's progress, with the log closed; nothing hides the reason for which a run ended."""
    try:
        return _ask(station.close, run, status)
    except Exception:
        if status == "finished":
            raise
        return Progress()


def _first(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _go_on(run: Path) -> str:
    return f"Go on with `srl train --resume --run {run.name}`"
