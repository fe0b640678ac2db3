"""What a run does when a watch stops it: it says which command starts again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from srl.config import Config
from srl.train.checkpoint import delete_checkpoints
from srl.train.resume import new_run_command
from srl.train.run_directory import checkpoints
from srl.train.watches import RULES

LOWER = 0.5
"""The factor on the learning rate that is proposed for a new run."""


def last_good_checkpoint(run: Path, config: Config, val_em: Mapping[int, float], since: int) -> int | None:
    """The step of the newest good checkpoint from before step `since`; None if there is none.

    It is good if the last validation up to its step is. `val_em` is the exact match of the validations by
    step; one is good unless it is more than the threshold of the watch `val_em` below the best up to it.
    """
    margin = config.watch.thresholds.get("val_em", RULES["val_em"].threshold)

    def is_good(step: int) -> bool:
        so_far = [val_em[at] for at in sorted(val_em) if at <= step]
        return not so_far or so_far[-1] >= max(so_far) - margin

    return max((step for step in checkpoints(run) if step < since and is_good(step)), default=None)


def how_to_start_again(run: Path, config: Config, good: int | None) -> str:
    """The command of a new run from the checkpoint at step `good`, or from the start where there is none,
    with the settings of this run and a lower learning rate."""
    command = new_run_command(run, f"actor.optim.lr={LOWER * config.actor.optim.lr:.3g}", good)
    where = "start again" if good is None else "start from the last good checkpoint"
    return f"{where} with a lower learning rate: {command}"


def drop_checkpoints_after(run: Path, step: int) -> None:
    """Delete the checkpoints of later steps."""
    delete_checkpoints(run, [path for at, path in checkpoints(run).items() if at > step])
