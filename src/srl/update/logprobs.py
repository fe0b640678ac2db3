"""Log-probs and entropies of the tokens with mask 1, without the logits of other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from srl.model import evaluating
from srl.update.batch import Batch, micro_batches
from srl.update.logits import Head, logits_of
from srl.update.losses import entropy_from_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 2048
"""The most tokens whose logits are in memory at the same time."""
KEPT_LOGITS = 2**24
"""A chunk with more logits than this recomputes them in the backward pass."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Results per token, `(B, T)`; entry t is for token t, 0 where the mask is 0."""

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)

    def put(self, index: Tensor, rows: TokenStats) -> None:
        """Fill the rows `index` in with those of a micro-batch, which may be narrower."""
        width = rows.logprobs.shape[1]
        self.logprobs[index, :width] = rows.logprobs.detach().to(self.logprobs.dtype)
        self.entropy[index, :width] = rows.entropy.detach().to(self.entropy.dtype)


def token_stats(model: PreTrainedModel, batch: Batch, mask: Tensor, temperature: float = 1.0) -> TokenStats:
    """log π(token_t | tokens before t) at `temperature`, and the entropy of that distribution.

    Computed in float32 (float64 for a model in float64), only where `mask` (B, T) is not 0. A row's first
    token has none. Both carry gradients if gradients are enabled.
    """
    wanted = mask[:, 1:] != 0  # (B, T-1)
    states, head = logits_of(model)(model, batch, wanted)  # (N, S): what predicts t + 1
    targets = batch.input_ids[:, 1:][wanted]  # (N,)
    pieces = [
        _head(head, states[start : start + CHUNK], targets[start : start + CHUNK], temperature)
        for start in range(0, len(targets), CHUNK)
    ]
    return TokenStats(*(_scatter(pieces, index, wanted) for index in range(2)))


def _head(head: Head, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy. Large logits are recomputed in the backward pass, not kept."""

    def compute(states: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states)  # (N, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        chosen = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
        return chosen, entropy_from_logits(logits)

    vocabulary = head.weight.shape[0] if hasattr(head, "weight") else states.shape[1]
    if torch.is_grad_enabled() and states.requires_grad and len(states) * vocabulary > KEPT_LOGITS:
        return checkpoint(compute, states, use_reentrant=False)
    return compute(states)


def _scatter(pieces: list[tuple[Tensor, Tensor]], index: int, wanted: Tensor) -> Tensor:
    """The pieces in their places in `(B, T)`; the first column, which has no prediction, is 0."""
    if not pieces:
        return torch.zeros(len(wanted), wanted.shape[1] + 1, device=wanted.device)
    values = torch.cat([piece[index] for piece in pieces])
    out = values.new_zeros(wanted.shape).masked_scatter(wanted, values)
    return torch.cat([torch.zeros_like(out[:, :1]), out], dim=1)


@torch.no_grad()
def batched_stats(
    model: PreTrainedModel, batch: Batch, mask: Tensor, *, max_tokens: int, temperature: float = 1.0
) -> TokenStats:
    """`token_stats` where `mask` (B, T) is 1, for a whole batch, in micro-batches, without gradients."""
    found = TokenStats(torch.zeros_like(mask), torch.zeros_like(mask))
    with evaluating(model):
        for index in micro_batches(batch.lengths, max_tokens):
            rows = batch.rows(index)
            width = rows.input_ids.shape[1]
            found.put(index, token_stats(model, rows, mask[index, :width], temperature))
    return found


def disable_dropout(model: nn.Module) -> None:
    """Switch dropout off, also in training mode: old and new log-probs must be of the same network.

    Models keep the rate in `nn.Dropout` or as an attribute of a module (`attention_dropout`, `layerdrop`).
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
