"""The check of a model before it trains: what is trained must be what was sampled, shown on random tokens.

The probe refuses a model that raises, looks ahead or gives NaN. Here log-probs and gradients are computed as
in an update. Whether the key-value cache is right is checked where an engine is made (`choose_forward`), and
whether rows can be packed where they are (`srl.update.packing`). A policy is in eval mode always.
`check_start` does it all before a run starts.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.config import Config
from srl.config.sections import Model
from srl.errors import UserError
from srl.models.check import Probe, attempt, probe
from srl.models.load import pick_device, pick_dtype
from srl.models.weights import shapes
from srl.progress import Note
from srl.rollout.choose_forward import choose_forward
from srl.train.load_components import engine_name, load_policy
from srl.train.make_missing import start_of
from srl.train.memory import available_memory, gib
from srl.train.threads import set_threads
from srl.update.batch import row_batch
from srl.update.logits import try_packing
from srl.update.logprobs import token_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROOM = 1.5
"""Memory for the check, in units of the weights."""
QUICK = 3 * 2**30
"""Bytes of weights that a CPU checks in seconds."""


def check_start(config: Config, note: Note) -> None:
    """Check the policy that a run starts from, where it is on this machine, quick to check and fits memory.

    `note` is told where it is not, and what `load_policy` and `check_model` tell. Raises UserError.
    """
    section = config.model.model_copy(update={"path": str(start_of(config))})
    if not has_room(section, note):
        return
    policy = load_policy(section, note if config.model.path is not None else lambda text: None)
    set_threads(policy.model, config)
    if engine_name(config) == "torch":
        choose_forward(policy.model, 1, config.data.max_episode_tokens)
    check_model(policy.model, config.data.max_episode_tokens, note)


def has_room(section: Model, note: Note) -> bool:
    """Whether the model is on this machine, and its device has memory to check it; else `note` is told."""
    numbers = sum(map(prod, shapes(Path(section.path or "")).values()))
    device = pick_device(section.device)
    size = numbers * pick_dtype(section.dtype, device).itemsize
    if device.type == "cuda":
        most = torch.cuda.mem_get_info(device)[0] / ROOM
    else:
        most = min((available_memory() or QUICK * ROOM) / ROOM, QUICK)
    if size > most:
        note(f"the model is not checked beforehand: its weights are {gib(size)}, the limit is {gib(most)}")
    return 0 < size <= most


def check_model(model: PreTrainedModel, longest: int, note: Note) -> None:
    """Compare the log-probs of an update with those of each row alone, up to `longest` tokens.

    `note` is told where rows cannot be packed. Raises UserError where the log-probs differ or a pass raises.
    """
    expected, name = probe(model, longest), type(model).__name__
    if why := attempt(model, lambda: _mismatch(model, expected)):
        raise UserError(f"{name}: log-probs as trained are not those of the model as it samples, {why}")
    if not try_packing(model, longest):
        note(f"{name}: the rows of an update are padded, since packed ones would not be right")


def _mismatch(model: PreTrainedModel, expected: Probe) -> str | None:
    """How log-probs differ, in words, after a forward and a backward pass; None where they agree."""
    batch = row_batch(expected.rows, model.device)
    count, lengths = expected.ends.shape[1] - 1, batch.lengths[:, None]
    columns = torch.arange(batch.input_ids.shape[1], device=model.device)
    mask = ((columns < lengths) & (columns >= lengths - count)).float()
    with torch.enable_grad():
        logprobs = token_stats(model, batch, mask, entropy=False).logprobs
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        small = [weight for weight in weights if weight.ndim < 2]  # of every layer, and quick
        torch.autograd.grad(logprobs.sum(), small or weights, allow_unused=True)
    targets = batch.input_ids[mask != 0].view(-1, count, 1)
    expected_logprobs: Tensor = expected.ends[:, :-1].log_softmax(-1).gather(2, targets)[..., 0]
    return expected.wrong(logprobs.detach()[mask != 0].view(-1, count), expected_logprobs)
