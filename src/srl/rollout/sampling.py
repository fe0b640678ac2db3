"""Drawing tokens by inverse transform sampling, with random numbers that depend on a turn's key only.

Each token position has its own number, and a row's draw uses only that row's logits. So a row draws the
same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def turn_uniforms(key: Sequence[int | str], count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for the token positions of the turn with this key.

    The bits come from Philox, a counter-based generator, keyed by a blake2b hash of `key`. A longer turn
    begins with the numbers of a shorter one. They are the same in every process and numpy version.
    """
    text = ascii([part if isinstance(part, str) else int(part) for part in key])
    seed = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    bits = np.random.Philox(key=seed).random_raw(count)
    return (bits >> np.uint64(11)) * np.float64(2.0**-53)


def draw(
    logits: Tensor,
    temperature: NDArray[np.float64],
    top_p: NDArray[np.float64],
    uniforms: NDArray[np.float64],
) -> tuple[Tensor, Tensor]:
    """One token for each row of `logits` (B, V), and its log-prob; the other arguments are (B,).

    Temperature 0 takes the largest logit. The log-prob is log_softmax(logits / temperature) in
    float32 (temperature 1 for greedy rows), before top-p.
    """
    greedy = temperature == 0
    scale = _column(np.where(greedy, 1.0, temperature), logits)
    logprobs = torch.log_softmax(logits.float() / scale.float(), dim=-1)  # (B, V)
    if greedy.all():
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(_truncate(logprobs.exp(), top_p, logits), _column(uniforms, logits))
        if greedy.any():
            tokens = torch.where(_column(greedy, logits)[:, 0], logits.argmax(-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]  # (B, 1)


def _truncate(probs: Tensor, top_p: NDArray[np.float64], like: Tensor) -> Tensor:
    """`probs`, set to 0 outside the smallest set of most likely tokens with `top_p` of the mass."""
    if (top_p >= 1).all():
        return probs
    limit = _column(top_p, like)  # (B, 1)
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered  # (B, V), mass of likelier tokens
    kept = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, before < limit)
    return torch.where(kept | (limit >= 1), probs, 0.0)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform × total; it never has weight 0."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # (B, V)
    tokens = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)[:, 0]
    return tokens.clamp_(max=weights.shape[-1] - 1)
