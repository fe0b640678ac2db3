"""The disk that the checkpoints of a run take, and whether there is as much."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import lcm
from pathlib import Path

import torch

from srl.config.sections import Trainer
from srl.train.fit import Layout, gib
from srl.train.run_directory import checkpoints

LOCAL = Layout("local")


def lack_of_room(
    trainer: Trainer, steps: int, run: Path, size: int, *, saves_best: bool = False, each_step: bool = False
) -> str | None:
    """What to say if the checkpoints of `run`, of `size` bytes each, do not fit its disk.

    Those that the run has already are not counted: the disk has them. `steps` are those of the whole run.
    `saves_best` is as for `kept_checkpoints`. With `each_step` every step is saved and validated, as of
    `--algo rft`.
    """
    if each_step:
        trainer = trainer.model_copy(update={"save_freq": 1, "test_freq": 1})
    existing = next(path for path in (run, *run.absolute().parents) if path.is_dir())
    free, there = shutil.disk_usage(existing).free, checkpoints(run)
    more = kept_checkpoints(trainer, steps, there, saves_best=saves_best).most - len(there)
    if more * size <= free:
        return None
    fewer = "" if trainer.max_ckpt_to_keep == 1 else ", or set trainer.max_ckpt_to_keep=1"
    return (
        f"the checkpoints to come take up to {gib(more * size)} ({more} of {gib(size)}), and the disk of "
        f"{run} has {gib(free)} free; free some space{fewer}"
    )


@dataclass(frozen=True, slots=True)
class KeptCheckpoints:
    """Which checkpoints of a run stay: the `newest` so many (None: all), and the `best`.

    `most` are there at a time: an old one goes when the new one is written.
    """

    newest: int | None
    best: bool
    most: int


def kept_checkpoints(
    trainer: Trainer, steps: int, there: Collection[int] = (), *, saves_best: bool = False
) -> KeptCheckpoints:
    """What a run of `steps` steps keeps, from the checkpoints of the steps `there` on.

    With `saves_best` (that is `sft.patience`) a validation that is the best so far is saved too. Any of them
    may be, so all are counted.
    """
    newest, best = trainer.max_ckpt_to_keep, trainer.keep_best_ckpt and trainer.test_freq > 0
    last, periods = max(there, default=0), (trainer.save_freq, trainer.test_freq if saves_best else 0)

    def multiples(period: int) -> int:
        return (steps - 1) // period - last // period if period else 0

    saved = 1 + sum(map(multiples, periods)) - multiples(lcm(*periods)) if steps > last else 0
    most = len(there) + saved
    if newest and saved:
        most = min(most, max(newest + best, len(there)) + 1)
    return KeptCheckpoints(newest, best, most)


def checkpoint_bytes(
    actor: torch.nn.Module, critic: torch.nn.Module | None = None, *, optimiser: bool = True
) -> int:
    """Bytes on disk of a checkpoint of the local backend: a model, and what resuming needs.

    That is AdamW's state with `optimiser`, and what is trained of a critic; an adapter is also there merged
    into the model.
    """
    trained = [*_trained(actor), *(_trained(critic) if critic else ())] if optimiser else []
    state = sum(weight.numel() * LOCAL.state_bytes(weight.element_size())[1] for weight in trained)
    model, adapted = list(actor.parameters()), _trained(actor)
    again = _bytes(adapted) if len(adapted) < len(model) else 0
    return _bytes(model) + again + (_bytes(_trained(critic)) if critic else 0) + state


def _trained(network: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [weight for weight in network.parameters() if weight.requires_grad]


def _bytes(weights: Iterable[torch.nn.Parameter]) -> int:
    return sum(weight.numel() * weight.element_size() for weight in weights)
