"""Log-probs, entropies and values of the tokens that matter, without the logits of the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from srl.update.batch import Batch, micro_batches

CHUNK = 2048
"""Tokens whose logits exist at the same time."""


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Per-token results, `(B, T)`; entry t speaks of token t, zero where the mask is 0."""

    logprobs: Tensor  # (B, T)
    entropy: Tensor  # (B, T)


def token_stats(model: nn.Module, batch: Batch, mask: Tensor, temperature: float = 1.0) -> TokenStats:
    """log π(token_t | tokens before t) at `temperature`, and the entropy of that distribution.

    Computed in float32 and only where `mask` (B, T) is not 0; the first token of a row has none.
    Both carry gradients where gradients are enabled.
    """
    hidden = last_hidden_state(model, batch)[:, :-1]  # (B, T-1, D): the state that predicts t + 1
    wanted = mask[:, 1:] != 0
    states, targets = hidden[wanted], batch.input_ids[:, 1:][wanted]  # (N, D), (N,)
    pieces = [
        _head(model, states[start : start + CHUNK], targets[start : start + CHUNK], temperature)
        for start in range(0, len(targets), CHUNK)
    ]
    return TokenStats(*(_scatter(pieces, index, wanted) for index in range(2)))


def _head(model: nn.Module, states: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy; recomputed in the backward pass, so logits never pile up."""
    head = model.get_output_embeddings()

    def compute(states: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = torch.log_softmax(head(states).float() / temperature, dim=-1)  # (N, V)
        chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
        return chosen, -(logprobs.exp() * logprobs).sum(-1)

    if torch.is_grad_enabled() and states.requires_grad and len(states) * head.weight.shape[0] > 2**24:
        return checkpoint(compute, states, use_reentrant=False)
    return compute(states)


def _scatter(pieces: list[tuple[Tensor, Tensor]], index: int, wanted: Tensor) -> Tensor:
    """The pieces back in their places, with the first column that has no prediction."""
    out = torch.zeros(wanted.shape, dtype=torch.float32, device=wanted.device)
    if pieces:
        out = out.masked_scatter(wanted, torch.cat([piece[index] for piece in pieces]))
    return torch.cat([torch.zeros_like(out[:, :1]), out], dim=1)


def last_hidden_state(model: nn.Module, batch: Batch) -> Tensor:
    """The decoder's output `(B, T, D)`, before the language-model head."""
    decoder = trunk(model)
    out = decoder(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        position_ids=batch.position_ids,
        use_cache=False,
    )
    return out.last_hidden_state


def trunk(model: nn.Module) -> nn.Module:
    """The decoder under the head, through a LoRA wrapper where there is one."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.get_decoder() if hasattr(inner, "get_decoder") else inner.base_model


@torch.no_grad()
def batched_stats(
    model: nn.Module, batch: Batch, mask: Tensor, *, max_tokens: int, temperature: float = 1.0
) -> TokenStats:
    """`token_stats` where `mask` (B, T) is 1, for a whole batch, in micro-batches, without gradients."""
    logprobs, entropy = torch.zeros_like(mask), torch.zeros_like(mask)
    was_training = model.training
    model.eval()
    for index in micro_batches(batch.lengths, max_tokens):
        rows = batch.rows(index)
        width = rows.input_ids.shape[1]
        stats = token_stats(model, rows, mask[index, :width], temperature)
        logprobs[index, :width] = stats.logprobs
        entropy[index, :width] = stats.entropy
    model.train(was_training)
    return TokenStats(logprobs, entropy)


def disable_dropout(model: nn.Module) -> None:
    """No dropout, in training mode either: old and new log-probs must be of the same network."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0
