"""Checkpoints of the local backend: a Hugging Face model directory, with `trainer/` to resume from in it."""

from __future__ import annotations

import pickle
import shlex
import shutil
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from srl.config import Config
from srl.errors import UserError, first_line
from srl.files import (
    ABOUT,
    CHECKPOINT,
    HAS_MANIFEST,
    DamagedError,
    atomic_directory,
    before,
    check_checkpoint,
    checksums,
    discard,
    files_in,
    link_or_copy,
    read_json,
    read_manifest,
    remove_leftovers,
    write_json,
    write_manifest,
)
from srl.models.check import check_saved
from srl.models.load import load_model
from srl.models.weights import has_lora, save_model
from srl.train.model_card import write_card
from srl.train.resume import names_a_way_around
from srl.train.run_directory import (
    CHECKPOINTS,
    STATE,
    Progress,
    checkpoint_path,
    checkpoints,
    superseded_checkpoints,
)
from srl.update.critic import Critic
from srl.update.kl import KLController
from srl.update.optimiser import Optimiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Networks(Protocol):
    """What a checkpoint holds: the policy, and the critic and the KL controller of an algorithm with them."""

    @property
    def config(self) -> Config: ...

    @property
    def actor(self) -> PreTrainedModel: ...

    @property
    def critic(self) -> Critic | None: ...

    @property
    def kl_control(self) -> KLController | None: ...


def save_checkpoint(
    run: Path,
    progress: Progress,
    learner: Networks,
    tokenizer: Any,
    optimisers: dict[str, Optimiser],
    card: dict[str, Any],
    keep: int | None,
    keep_best: bool = True,
) -> Path:
    """Write `checkpoints/step-…`, whole or not at all, and delete all but the newest `keep` (None: keep all)
    and, if `keep_best`, the one with the best validation.

    Files that somebody else put into an earlier checkpoint of the step stay. Nothing is in it twice: of a
    policy without an adapter the model has the weights. Its manifest has the checksum of every file. The
    first of a run is loaded anew. Raises UserError where that is not the model that was trained.
    """
    path = checkpoint_path(run, progress.step)
    is_first = not checkpoints(run)
    with atomic_directory(path, replace=lambda path: None) as folder:
        save_model(learner.actor, tokenizer, folder)
        if is_first:
            check_saved(learner.actor, folder, learner.config.model.trust_remote_code)
        write_card(folder / ABOUT, {"step": progress.step, **card, **HAS_MANIFEST})
        trainer = folder / "trainer"
        trainer.mkdir()
        write_json(folder / STATE, {"format": 1, **asdict(progress)})
        for name, optimiser in optimisers.items():
            _save(optimiser.state_dict(), trainer / f"{name}-optimiser.pt")
        if has_lora(learner.actor):  # else its weights are the model's
            _save(trained_weights(learner.actor), trainer / "actor.pt")
        if learner.critic is not None:
            _save(trained_weights(learner.critic), trainer / "critic.pt")
        write_manifest(folder, CHECKPOINT, {"step": progress.step, "files": checksums(folder)})
        _link_foreign_files(path, folder)
    _drop_superseded(run, progress, keep, keep_best)
    return path


def _link_foreign_files(earlier: Path, folder: Path) -> None:
    """Keep what somebody else put into an `earlier` checkpoint, which a roll-back writes again."""
    there = files_in(earlier)
    ours = read_manifest(earlier, CHECKPOINT)["files"] if there else ()
    for name in there:
        if name not in ours and not (folder / name).exists():
            link_or_copy(earlier / name, folder / name)


def save_validated(run: Path, progress: Progress, keep: int | None, keep_best: bool = True) -> None:
    """Put the validation of its step into a checkpoint that was saved before it, and delete as
    `save_checkpoint` does.

    The checkpoint is replaced whole or not at all. Its other files, also those that somebody else put into
    it, are linked, or copied where the disk has no links.
    """
    path = checkpoint_path(run, progress.step)
    with atomic_directory(path, replace=lambda path: None) as folder:
        shutil.copytree(path, folder, copy_function=link_or_copy, dirs_exist_ok=True)
        write_json(folder / STATE, {"format": 1, **asdict(progress)})
        files = read_manifest(path, CHECKPOINT)["files"] | checksums(folder, [STATE])
        write_manifest(folder, CHECKPOINT, {"step": progress.step, "files": files})
    _drop_superseded(run, progress, keep, keep_best)


def _drop_superseded(run: Path, progress: Progress, keep: int | None, keep_best: bool) -> None:
    delete_checkpoints(run, superseded_checkpoints(run, keep, val_em=progress.val_em if keep_best else None))


def delete_checkpoints(run: Path, paths: Iterable[Path]) -> None:
    """Delete checkpoints of `run`, each hidden first by a rename, and what is left of earlier ones and of
    those that a killed process was writing."""
    for path in paths:
        discard(path)
    remove_leftovers(run / CHECKPOINTS, alone=True)  # only this process writes: it has the log's lock


def _save(tensors: object, path: Path) -> None:
    """`torch.save` through a file of Python: given a path, it does not say that the disk is full."""
    with path.open("wb") as file:
        torch.save(tensors, file)


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained: those of the adapter if there is one."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def load_newest(newest: Path, learner: Networks, optimisers: dict[str, Optimiser]) -> Progress:
    """`load_checkpoint`; where it is damaged, the error says how to resume without it."""
    with names_a_way_around(newest):
        return load_checkpoint(newest, learner, optimisers)


def load_checkpoint(path: Path, learner: Networks, optimisers: dict[str, Optimiser]) -> Progress:
    """Load weights and optimiser state in place; returns the run's progress at that checkpoint.

    Raises DamagedError if a file differs from what was saved, and UserError for a checkpoint without trainer
    state or of another model.
    """
    trainer = path / "trainer"
    if (path / STATE).is_file():
        check_checkpoint(path)
    progress = _read_state(path / STATE)
    try:
        put_weights(learner.actor, _actor_weights(path, learner))
        if learner.critic is not None:
            put_weights(learner.critic, _critic_weights(trainer / "critic.pt"))
        for name, optimiser in optimisers.items():
            optimiser.load_state_dict(_load(trainer / f"{name}-optimiser.pt"))
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} is not a checkpoint of this run: {first_line(error)}") from error
    if learner.kl_control is not None:
        learner.kl_control.load_state_dict(progress.kl)
    return progress


def _actor_weights(path: Path, learner: Networks) -> dict[str, torch.Tensor]:
    """The policy's trained weights in a checkpoint: an adapter's are in the trainer's state; without one they
    are the model's own. An older checkpoint has them in the trainer's state too."""
    own, actor = path / "trainer" / "actor.pt", learner.actor
    if own.is_file() or has_lora(actor):
        return _load(own)
    trust, dtype = learner.config.model.trust_remote_code, str(actor.dtype).removeprefix("torch.")
    return dict(load_model(path, dtype=dtype, device="cpu", trust_remote_code=trust).named_parameters())


def _critic_weights(path: Path) -> dict[str, torch.Tensor]:
    """The critic's trained weights. Raises ValueError for those of a critic that no longer exists: a copy of
    a policy's adapter together with the weights under it."""
    saved: dict[str, torch.Tensor] = _load(path)
    if any(".base_layer." in name for name in saved) and any(".lora_" in name for name in saved):
        raise ValueError(
            "its critic is an older version's, which trained a copy of the policy's adapter too; start a new "
            f"run from its policy: {shlex.join(['srl', 'train', '--model', str(path.parent.parent)])}"
        )
    return saved


def put_weights(model: torch.nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy `saved` into the trained weights. Raises ValueError if names or shapes differ."""
    weights = trained_weights(model)
    if unmatched := sorted(weights.keys() ^ saved.keys()):
        raise ValueError(f"{unmatched[0]} is not in both the model and the checkpoint")
    for name, weight in weights.items():
        if weight.shape != saved[name].shape:
            raise ValueError(
                f"{name}: expected shape {tuple(weight.shape)}, found {tuple(saved[name].shape)}"
            )
        weight.copy_(saved[name])


def _read_state(path: Path) -> Progress:
    if not path.is_file():
        raise UserError(f"{path} is missing: this checkpoint has no trainer state to resume from")
    return read_json(path, Progress)


def _load(path: Path) -> Any:
    """What `torch.save` wrote, mapped from the disk and read as data only. Raises DamagedError for others."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickles that it did not write
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise
    except (EOFError, OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise DamagedError(
            f"{path} is damaged: it cannot be read as weights{before(path.parent.parent)}"
        ) from error
