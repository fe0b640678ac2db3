"""The disk that the checkpoints of a run take, and whether there is as much."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from srl.config.sections import Trainer
from srl.train.fit import FLOAT32, MOMENTS, gib
from srl.train.run_directory import checkpoints


def lack_of_room(
    trainer: Trainer, steps: int, run: Path, size: int, *, saves_best: bool = False
) -> str | None:
    """What to say if the checkpoints of `run`, of `size` bytes each, do not fit its disk.

    Those that the run has already are not counted: the disk has them. `steps` are those of the whole run.
    """
    existing = next(path for path in (run, *run.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    there = checkpoints(run)
    last = max(there, default=0)
    more = checkpoints_to_come(trainer, steps, len(there), last, saves_best=saves_best)
    if more * size <= free:
        return None
    fewer = "" if trainer.max_ckpt_to_keep == 1 else ", or set trainer.max_ckpt_to_keep=1"
    return (
        f"the checkpoints to come take up to {gib(more * size)} ({more} of {gib(size)}), and the disk of "
        f"{run} has {gib(free)} free; free some space{fewer}"
    )


def checkpoints_to_come(
    trainer: Trainer, steps: int, there: int = 0, last: int = 0, *, saves_best: bool = False
) -> int:
    """The most checkpoints that a run of `steps` steps adds to those `there`, of which the newest is of the
    step `last`: an old one goes when the new one is written.

    With `saves_best` (that is `sft.patience`) a validation that is the best so far is saved too.
    """
    periods = [period for period in (trainer.save_freq, saves_best and trainer.test_freq) if period]
    saved = int(steps > last) + sum((steps - 1) // period - last // period for period in periods)
    newest, best = trainer.max_ckpt_to_keep, trainer.test_freq > 0
    if newest is None or saved <= 0:
        return max(saved, 0)
    return min(saved, max(newest + best - there, 0) + 1)


def checkpoint_bytes(
    actor: torch.nn.Module, critic: torch.nn.Module | None = None, *, optimiser: bool = True
) -> int:
    """Bytes on disk of a checkpoint of the local backend: a model, and what resuming needs.

    That is AdamW's state with `optimiser`, and what is trained of a critic; an adapter is also there merged
    into the model.
    """
    model, adapted, valued = list(actor.parameters()), _trained(actor), _trained(critic) if critic else []
    again = _bytes(adapted) if len(adapted) < len(model) else 0
    state = 0
    for weight in [*adapted, *valued] if optimiser else ():
        state += weight.numel() * (MOMENTS + (FLOAT32 if weight.element_size() < FLOAT32 else 0))
    return _bytes(model) + again + _bytes(valued) + state


def _trained(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in network.parameters() if weight.requires_grad]


def _bytes(weights: Iterable[torch.nn.Parameter]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)
