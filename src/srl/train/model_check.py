"""The check of a model before it trains: what is trained must be what was sampled, shown on random tokens.

The probe refuses a model that raises, looks ahead or gives NaN. Here log-probs and gradients are computed as
in an update. Whether the key-value cache is right is checked where an engine is made (`choose_forward`), and
whether rows can be packed where they are (`srl.update.packing`). A policy is in eval mode always.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.errors import UserError
from srl.models.check import Probe, attempt, probe
from srl.progress import Note
from srl.update.batch import row_batch
from srl.update.logits import try_packing
from srl.update.logprobs import token_stats

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
