"""The disk that the checkpoints of a run take, and whether there is as much."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from srl.config.sections import Trainer
from srl.train.fit import FLOAT32, MOMENTS, gib
from srl.train.run_directory import checkpoints


def lack_of_room(trainer: Trainer, steps: int, run: Path, size: int) -> str | None:
    """What to say if the checkpoints that `run` of `steps` steps will add, of `size` bytes each, may not fit.

    Those that are kept are the newest and the best, and there is one more while it is written.
    """
    there = checkpoints(run)
    more = 1 + (steps - 1 - max(there, default=0)) // trainer.save_freq if trainer.save_freq else 1
    if trainer.max_ckpt_to_keep is not None:
        more = min(more, max(trainer.max_ckpt_to_keep + 1 - len(there), 0) + 1)
    free = shutil.disk_usage(next(path for path in (run, *run.absolute().parents) if path.is_dir())).free
    if more * size <= free:
        return None
    fewer = "" if trainer.max_ckpt_to_keep == 1 else ", or set trainer.max_ckpt_to_keep=1"
    return (
        f"the checkpoints to come take up to {gib(more * size)} ({more} of {gib(size)}), and the disk of "
        f"{run} has {gib(free)} free; free some space{fewer}"
    )


def checkpoint_bytes(
    actor: torch.nn.Module, critic: torch.nn.Module | None = None, *, optimiser: bool = True
) -> int:
    """Bytes on disk of a checkpoint of the local backend: the model, an adapter also by itself, what is
    trained of a critic, and AdamW's state with `optimiser`."""
    weights = list(actor.parameters())
    trained = [weight for weight in weights if weight.requires_grad]
    of_critic = [weight for weight in critic.parameters() if weight.requires_grad] if critic else []
    size = sum(weight.nbytes for weight in (*weights, *of_critic))
    size += sum(weight.nbytes for weight in trained) if len(trained) < len(weights) else 0
    for weight in (*trained, *of_critic) if optimiser else ():
        size += weight.numel() * (MOMENTS + (FLOAT32 if weight.element_size() < FLOAT32 else 0))
    return size
