"""The check of the model before a run on verl starts a process: as verl trains it, in train mode.

verl loads the model with our overrides of its `config.json`, and turns train mode on for its updates. What
train mode changes beyond these (a router that samples) would train another policy than the one that sampled.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srl.config import Config
from srl.errors import UserError
from srl.models.check import attempt, ends_of, probe
from srl.models.load import load_model, return_free_memory
from srl.models.weights import add_lora, shapes, stored_weights
from srl.progress import Note
from srl.rollout.choose_forward import choose_forward
from srl.train.load_components import model_options
from srl.train.make_missing import start_of
from srl.train.memory import available_memory, gib, meta_model
from srl.train.model_check import check_model
from srl.train.threads import set_threads
from srl.train.verl.job import TORCH, Job, model_config, rollout_name
from srl.train.verl.translate import without_dropout

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROOM = 1.5
"""Memory for the check, in units of the weights."""
QUICK = 3 * 2**30
"""Bytes of weights that a CPU checks in seconds."""


def check_start_on_verl(config: Config, job: Job, note: Note) -> None:
    """Check the model on the CPU, where it is on this machine, quick to check and fits memory.

    `note` is told where it is not. Raises UserError, also for adapters that verl merges wrongly.
    """
    path = str(start_of(config))
    if not (Path(path) / "config.json").is_file():
        return
    _check_adapters(config, path)
    attention = config.model.attn_implementation
    section = config.model.model_copy(update={
        "path": path, "device": "cpu", "dtype": "float32", "gradient_checkpointing": False,
        "attn_implementation": "auto" if "flash" in attention else attention,
    })  # fmt: skip
    size = sum(map(prod, shapes(Path(path)).values())) * torch.float32.itemsize
    most = min((available_memory() or QUICK * ROOM) / ROOM, QUICK)
    if size > most:
        note(f"the model is not checked beforehand: its weights are {gib(size)}, the limit is {gib(most)}")
    if not 0 < size <= most:
        return
    overrides = without_dropout(model_config(path))
    with torch.random.fork_rng(devices=[]):
        _check(load_model(path, **model_options(section), overrides=overrides), config, job)
    return_free_memory()


def _check(model: PreTrainedModel, config: Config, job: Job) -> None:
    """The local backend's check, and that train mode changes nothing. verl packs rows in its own way."""
    set_threads(model, config)
    longest = config.data.max_episode_tokens
    expected = probe(model, longest)
    why = attempt(model.train(), lambda: expected.wrong(ends_of(model, expected)))
    if why:
        raise UserError(
            f"{type(model).__name__}: verl trains in train mode, in which the outputs differ {why} from "
            "those that are sampled; train with --backend local"
        )
    model.eval()
    if rollout_name(config, job) == TORCH:
        choose_forward(model, 1, longest)
    check_model(model, longest, lambda text: None)


def _check_adapters(config: Config, path: str) -> None:
    """Raises UserError for an adapter on a weight that is tied or holds several experts.

    verl merges an adapter into its weight in place, which all tied ones share.
    """
    settings = config.model
    if settings.lora_rank == 0:
        return
    model = meta_model(config, path, torch.float32)
    add_lora(model, settings.lora_rank, settings.lora_alpha, settings.lora_target_modules)
    weights = stored_weights(model)
    shared = Counter(id(weight.held) for weight in weights)
    for weight in weights:
        experts = any(hasattr(layer, "parameter_name") for layer in weight.layers)
        if weight.layers and (experts or shared[id(weight.held)] > 1):
            kind = "holds several experts" if experts else "is tied to another weight"
            raise UserError(
                f"model.lora_target_modules: {weight.name} {kind}, and verl cannot merge an adapter into it; "
                "leave its module out, or train with --backend local"
            )
