"""The disk that the checkpoints of a run take, and whether there is as much."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from srl.config import Config
from srl.config.sections import Trainer
from srl.train.dry_run.memory import Layout, gib
from srl.train.run_directory import SFT

LOCAL = Layout("local")


def lack_of_room(config: Config, algo: str, folder: Path, size: int) -> str | None:
    """What to say if the checkpoints of a run, of `size` bytes each, do not fit the disk of `folder`."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free, steps = shutil.disk_usage(existing).free, config.trainer.total_training_steps
    most = most_checkpoints(config.trainer, config.sft.steps if algo == SFT else steps)
    if most * size <= free:
        return None
    fewer = "" if config.trainer.max_ckpt_to_keep == 1 else ", or set trainer.max_ckpt_to_keep=1"
    return (
        f"the checkpoints take up to {gib(most * size)} ({most} of {gib(size)}), and the disk of {folder} "
        f"has {gib(free)} free; free some space{fewer}"
    )


def most_checkpoints(trainer: Trainer, steps: int) -> int:
    """The most checkpoints that are there at a time: an old one goes when the new one is written."""
    saved = math.ceil(steps / trainer.save_freq) if trainer.save_freq else 1
    newest, best = trainer.max_ckpt_to_keep, trainer.keep_best_ckpt and trainer.test_freq > 0
    return min(saved, newest + best + 1) if newest else saved


def checkpoint_bytes(actor: torch.nn.Module, critic: torch.nn.Module | None = None) -> int:
    """Bytes on disk of a checkpoint of the local backend: a model, and what resuming needs.

    That is AdamW's state, and what is trained of a critic; an adapter is also there merged into the model.
    """
    trained = [*_trained(actor), *(_trained(critic) if critic else ())]
    state = sum(weight.numel() * LOCAL.state_bytes(weight.element_size())[2] for weight in trained)
    model, adapted = list(actor.parameters()), _trained(actor)
    again = _bytes(adapted) if len(adapted) < len(model) else 0
    return _bytes(model) + again + (_bytes(_trained(critic)) if critic else 0) + state


def _trained(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in network.parameters() if weight.requires_grad]


def _bytes(weights: Iterable[torch.nn.Parameter]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)
