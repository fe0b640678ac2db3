"""A run with another number of steps than it was planned for: `srl train --resume --steps N`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import srl.store
from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.errors import UserError
from srl.store.parts import FINISHED
from srl.train.learning_rate import Network, learning_steps, updates_per_step, warmup_steps
from srl.train.prepare import Note
from srl.train.progress import Progress
from srl.train.resuming import LOG, resume_command
from srl.update.optimiser import schedule

_PROGRESS = """
SELECT max(em) FILTER (phase = 'test' AND step = 0), arg_max(em, step) FILTER (phase = 'test' AND step > 0),
    max(em) FILTER (phase = 'val'),
    (SELECT sum(value) FROM metrics WHERE phase = 'train' AND name = 'timing_s/step')
FROM steps
"""


@dataclass(frozen=True, slots=True)
class Extension:
    """What a run notes of it in `run.json`: after step `at` it was to have `after` steps, not `before`."""

    at: int
    before: int
    after: int
    when: str


def planned(run: Path, config: Config, steps: int | None, done: int) -> Config:
    """`config` with `steps` in all; None leaves it as it is. Raises UserError where they are done already."""
    if steps is None:
        return config
    if steps <= done:
        raise UserError(
            f"--steps {steps}: {run.name} has made {done} steps, and --steps is the new total: give a larger "
            "number, or leave it out"
        )
    trainer = config.trainer.model_copy(update={"total_training_steps": steps})
    return config.model_copy(update={"trainer": trainer})


def finished(run: Path, config: Config, done: int, note: Note) -> Progress | None:
    """The progress of a run that has made all its steps and closed its log, which is said; else None."""
    if done < config.trainer.total_training_steps or not (run / LOG / FINISHED).is_file():
        return None
    note(f"{run.name} is finished, all {done} steps; to go on: {resume_command(run)} --steps N")
    with srl.store.open(run) as log:
        start, end, best, seconds = log.execute(_PROGRESS).fetchall()[0]
    return Progress(done, seconds or 0.0, start, end, best)


def rate_notes(before: Config, after: Config, done: int) -> Iterator[str]:
    """What becomes of each learning rate, now that the schedule has another end."""
    networks: list[Network] = ["actor"]
    if algorithm_plugin(after.algorithm.name).needs_critic:
        networks.append("critic")
    for network in networks:
        kind = getattr(after, network).optim.lr_scheduler_type
        last, now = rate(before, network, max(1, done)), rate(after, network, done + 1)
        if now == rate(before, network, done + 1):
            yield f"the learning rate of the {network} goes on at {now:.3g}"
            continue
        yield (
            f"the {kind} schedule of the {network} is planned anew for {after.trainer.total_training_steps} "
            f"steps: its learning rate goes from {last:.3g} in step {done} to {now:.3g} in step {done + 1}"
        )


def rate(config: Config, network: Network, step: int) -> float:
    """The learning rate of the first optimiser step of a training step, counted from 1."""
    section, learning = getattr(config, network), learning_steps(config, network)
    updates = updates_per_step(config, section)
    waits = config.trainer.total_training_steps - learning
    factor = schedule(
        section.optim.lr_scheduler_type, warmup_steps(config, network) * updates, learning * updates
    )
    return float(section.optim.lr * factor(max(0, step - 1 - waits) * updates))
