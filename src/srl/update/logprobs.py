"""Log-probs and entropies of the tokens with mask 1, without the logits of other tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from srl.update.batch import Batch
from srl.update.logits import Head, logits_of, micro_batches_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 2048
"""The most tokens whose logits are in memory at the same time."""
KEPT_LOGITS = 2**24
"""A chunk with more logits than this recomputes them in the backward pass."""
FLOAT32_LOGITS = {"cpu": 2**21, "cuda": 2**26}
"""The most logits that are in float32 at the same time; on the CPU they stay in its cache."""


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


def token_stats(
    model: PreTrainedModel, batch: Batch, mask: Tensor, temperature: float = 1.0, *, entropy: bool = True
) -> TokenStats:
    """log π(token_t | tokens before t) at `temperature`, and the `entropy` of that distribution, else zeros.

    Computed in float32 (float64 for a model in float64), only where `mask` (B, T) is not 0. Padding and a
    row's first token have none. Both carry gradients if gradients are enabled.
    """
    positions = ((mask != 0) & (batch.attention_mask != 0))[:, 1:]  # (B, T-1)
    states, head = logits_of(model)(model, batch, positions)  # (N, S): what predicts t + 1
    targets = batch.input_ids[:, 1:][positions]  # (N,)
    pieces = [
        _head(head, states[start : start + CHUNK], targets[start : start + CHUNK], temperature, entropy)
        for start in range(0, len(targets), CHUNK)
    ]
    return TokenStats(*(_scatter(pieces, index, positions) for index in range(2)))


def _head(
    head: Head, states: Tensor, targets: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and entropy. Large logits are recomputed in the backward pass, not kept."""

    def compute(states: Tensor) -> tuple[Tensor, Tensor]:
        return _FromLogits.apply(head(states), targets, temperature, entropy)

    vocabulary = head.weight.shape[0] if hasattr(head, "weight") else states.shape[1]
    if torch.is_grad_enabled() and states.requires_grad and len(states) * vocabulary > KEPT_LOGITS:
        return checkpoint(compute, states, use_reentrant=False)
    return compute(states)


class _FromLogits(torch.autograd.Function):
    """Log-prob of each target and entropy, (N,) each, from logits (N, V) in any dtype.

    With z the logits in float32 over the temperature, L = logsumexp(z) and p = exp(z − L):

        log π = z[target] − L                  d log π / dz = 1[target] − p
        H = L − Σ p·z                          dH / dz = −p·(z − L + H)

    Softmax and its gradient exist for `FLOAT32_LOGITS` at a time, so that no other tensor has their size than
    the logits and their gradient, in the logits' own dtype.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs, norms, entropies = (logits.new_zeros(len(logits), dtype=wide) for _ in range(3))
        for part in _parts(logits):
            z = logits[part].to(wide) / temperature
            norms[part] = torch.logsumexp(z, dim=-1)
            logprobs[part] = z.gather(1, targets[part, None]).squeeze(1) - norms[part]
            if entropy:
                p = (z - norms[part, None]).exp_()
                entropies[part] = norms[part] - p.mul_(z).sum(dim=-1)
        ctx.save_for_backward(logits, targets, norms, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, targets, norms, entropies = ctx.saved_tensors
        of_chosen, of_entropy = grads
        out = torch.empty_like(logits)
        for part in _parts(logits):
            logp = (logits[part].to(norms.dtype) / ctx.temperature).sub_(norms[part, None])
            p = logp.exp()
            slope = torch.zeros_like(norms[part]) if of_chosen is None else of_chosen[part]
            if of_entropy is None:
                gradient = p.mul_(-slope[:, None])
            else:
                weight = of_entropy[part, None] * (logp + entropies[part, None]) + slope[:, None]
                gradient = p.mul_(weight).neg_()
            gradient.scatter_add_(1, targets[part, None], slope[:, None])
            out[part] = gradient.div_(ctx.temperature)
        return out, None, None, None


def _parts(logits: Tensor) -> list[slice]:
    """Slices of the rows of `logits`, each with at most `FLOAT32_LOGITS` of them."""
    most = FLOAT32_LOGITS["cpu" if logits.device.type == "cpu" else "cuda"]
    rows = max(1, most // max(logits.shape[1], 1))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _scatter(pieces: list[tuple[Tensor, Tensor]], index: int, positions: Tensor) -> Tensor:
    """The pieces in their places in `(B, T)`; the first column, which has no prediction, is 0."""
    if not pieces:
        return torch.zeros(len(positions), positions.shape[1] + 1, device=positions.device)
    values = torch.cat([piece[index] for piece in pieces])
    out = values.new_zeros(positions.shape).masked_scatter(positions, values)
    return torch.cat([torch.zeros_like(out[:, :1]), out], dim=1)


@torch.no_grad()
def batched_stats(
    model: PreTrainedModel, batch: Batch, mask: Tensor, *, max_tokens: int, temperature: float = 1.0
) -> TokenStats:
    """`token_stats` where `mask` (B, T) is 1, for a whole batch, in micro-batches, without gradients."""
    stats = TokenStats(torch.zeros_like(mask), torch.zeros_like(mask))
    for index in micro_batches_of(model, batch, max_tokens):
        rows = batch.rows(index)
        width = rows.input_ids.shape[1]
        stats.put(index, token_stats(model, rows, mask[index, :width], temperature))
    return stats
