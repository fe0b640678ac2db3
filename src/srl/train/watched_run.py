"""What a run does when a watch fires: it goes back to its last good checkpoint, or stops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from srl.config import Config
from srl.errors import UserError
from srl.train.checkpoint import delete_checkpoints, load_checkpoint
from srl.train.experience import Learner
from srl.train.learning_rate import lr_scale
from srl.train.resume import new_run_command
from srl.train.run_directory import Progress, checkpoint_path, checkpoints
from srl.train.watches import Fired, Watcher
from srl.update.optimiser import Optimiser


def last_good_checkpoint(run: Path, val_em: Mapping[int, float], since: int, margin: float) -> int | None:
    """The step of the newest good checkpoint from before step `since`; None if there is none.

    It is good if the last validation up to its step is. `val_em` is the exact match of the validations by
    step; one is good unless it is more than `margin` below the best up to it.
    """

    def is_good(step: int) -> bool:
        so_far = [val_em[at] for at in sorted(val_em) if at <= step]
        return not so_far or so_far[-1] >= max(so_far) - margin

    return max((step for step in checkpoints(run) if step < since and is_good(step)), default=None)


def stopped(run: Path, config: Config, fired: Fired, good: int | None, rollbacks: int) -> str:
    """The line that a run is stopped with: what fired, after how many roll-backs, and what to type."""
    is_last = fired.action == "rollback" and rollbacks >= config.watch.max_rollbacks
    number = f"{rollbacks} roll-back{'s' if rollbacks > 1 else ''}"
    times = f", after {number}{' (watch.max_rollbacks)' if is_last else ''}" if rollbacks else ""
    return f"stopped by {fired}{times}; {how_to_start_again(run, config, good, rollbacks)}"


def how_to_start_again(run: Path, config: Config, good: int | None, rollbacks: int) -> str:
    """The command of a new run from the checkpoint at step `good`, or from the start where there is none.

    It has the settings of this run, and a learning rate below that of its last steps.
    """
    lower = f"actor.optim.lr={config.actor.optim.lr * config.watch.rollback_lr_factor ** (rollbacks + 1):.3g}"
    command = new_run_command(run, lower, good)
    if good is None:
        return f"there is no good checkpoint: start again with a lower learning rate: {command}"
    return f"start from the last good checkpoint with a lower learning rate: {command}"


def roll_back(
    run: Path, config: Config, fired: Fired, progress: Progress, watcher: Watcher, learner: Learner,
    optimisers: Mapping[str, Optimiser],
) -> tuple[Fired, Progress]:  # fmt: skip
    """Load the last good checkpoint, with lower learning rates; returns what was done and the progress there.

    Raises UserError, after `fired` has become a stop, where there is no good checkpoint or the run was rolled
    back too often. Nothing on disk changes: the caller saves the checkpoint again, which makes the roll-back
    last, and then drops what came later. A run that is killed before repeats its steps and comes here again.
    """
    good = last_good_checkpoint(run, progress.val_em, fired.since, config.watch.val_em.threshold)
    if good is None or watcher.rollbacks >= config.watch.max_rollbacks:
        watcher.replace(fired, replace(fired, action="stop"))
        raise UserError(stopped(run, config, fired, good, watcher.rollbacks))
    before = load_checkpoint(checkpoint_path(run, good), learner, dict(optimisers))
    done = watcher.roll_back(fired, good, before.watch)
    for name, optimiser in optimisers.items():
        optimiser.set_lr(getattr(config, name).optim.lr * lr_scale(config, watcher))
    before.seconds = progress.seconds
    return done, before


def drop_checkpoints_after(run: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    delete_checkpoints(run, [path for at, path in checkpoints(run).items() if at > step])
