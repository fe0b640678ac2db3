"""Checkpoints of the local backend: a Hugging Face model directory, with `trainer/` to resume from in it."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from srl.config import Config
from srl.errors import UserError, first_line
from srl.files import (
    ABOUT,
    CHECKPOINT,
    FORMAT,
    atomic_directory,
    check_checkpoint,
    check_format,
    checksums,
    discard,
    json_object,
    remove_leftovers,
    write_json,
    write_manifest,
)
from srl.models.load import check_saved, load_model
from srl.models.weights import has_lora, save_model
from srl.train.load_protocol import stop_strings, write_card
from srl.train.run_directory import CHECKPOINTS, STATE
from srl.update.critic import Critic
from srl.update.optimiser import Optimiser

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Networks(Protocol):
    """What a checkpoint holds: the policy, and the critic of an algorithm with one."""

    @property
    def config(self) -> Config: ...

    @property
    def actor(self) -> PreTrainedModel: ...

    @property
    def critic(self) -> Critic | None: ...


def save_checkpoint(
    path: Path, networks: Networks, tokenizer: Any, optimisers: dict[str, Optimiser], state: dict[str, Any],
    card: dict[str, Any], *, is_first: bool,
) -> None:  # fmt: skip
    """Write a checkpoint, whole or not at all: the model, and the state to go on from in `trainer/`.

    Nothing is in it twice: of a policy without an adapter the model has the weights. Its manifest has the
    checksum of every file. The first of a run is loaded anew. Raises UserError where that is not the model
    that was trained.
    """
    with atomic_directory(path) as folder:
        save_model(networks.actor, tokenizer, folder, stop_strings=stop_strings(card))
        if is_first:
            check_saved(networks.actor, folder, networks.config.model.trust_remote_code)
        write_card(folder / ABOUT, card)
        trainer = folder / "trainer"
        trainer.mkdir()
        write_json(folder / STATE, {"format": FORMAT, **state})
        for name, optimiser in optimisers.items():
            _save(optimiser.state_dict(), trainer / f"{name}-optimiser.pt")
        if has_lora(networks.actor):  # else its weights are the model's
            _save(trained_weights(networks.actor), trainer / "actor.pt")
        if networks.critic is not None:
            _save(trained_weights(networks.critic), trainer / "critic.pt")
        write_manifest(folder, CHECKPOINT, {"files": checksums(folder)})


def delete_checkpoints(run: Path, paths: Iterable[Path]) -> None:
    """Delete checkpoints of `run`, each hidden first by a rename, and what is left of earlier ones and of
    those that a killed process was writing."""
    for path in paths:
        discard(path)
    remove_leftovers(run / CHECKPOINTS)


def _save(tensors: object, path: Path) -> None:
    """`torch.save` through a file of Python: given a path, it does not say that the disk is full."""
    with path.open("wb") as file:
        torch.save(tensors, file)


def trained_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that are trained: those of the adapter if there is one."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def load_checkpoint(path: Path, networks: Networks, optimisers: dict[str, Optimiser]) -> dict[str, Any]:
    """Load weights and optimiser state in place; returns the state that was saved with them.

    Raises DamagedError if a file differs from what was saved, and UserError for a checkpoint without trainer
    state or of another model.
    """
    trainer, file = path / "trainer", path / STATE
    if not file.is_file():
        raise UserError(f"{file} is missing: this checkpoint has no trainer state to resume from")
    check_checkpoint(path)
    state = json_object(file.read_bytes(), str(file))
    check_format(file, state.pop("format", None))
    try:
        put_weights(networks.actor, _actor_weights(path, networks))
        if networks.critic is not None:
            put_weights(networks.critic, _load(trainer / "critic.pt"))
        for name, optimiser in optimisers.items():
            optimiser.load_state_dict(_load(trainer / f"{name}-optimiser.pt"))
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UserError(f"{path} is not a checkpoint of this run: {first_line(error)}") from error
    return state


def _actor_weights(path: Path, networks: Networks) -> dict[str, torch.Tensor]:
    """The policy's trained weights in a checkpoint: an adapter's are in the trainer's state; without one they
    are the model's own."""
    actor = networks.actor
    if has_lora(actor):
        return _load(path / "trainer" / "actor.pt")
    trust, dtype = networks.config.model.trust_remote_code, str(actor.dtype).removeprefix("torch.")
    return dict(load_model(path, dtype=dtype, device="cpu", trust_remote_code=trust).named_parameters())


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


def _load(path: Path) -> Any:
    """What `torch.save` wrote, mapped from the disk and read as data only."""
    with warnings.catch_warnings(action="ignore"):  # torch warns of pickles that it did not write
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
