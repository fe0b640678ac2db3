"""Drawing tokens by inverse transform sampling, with random numbers that depend on a turn's key only.

Each token position has its own number, and a row's draw uses only that row's logits. So a row draws the
same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256
"""Tokens that are added up together in float32 when a large vocabulary is searched."""


def turn_uniforms(key: Sequence[int | str], count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for the token positions of the turn with this key.

    The bits come from Philox, a counter-based generator, keyed by a blake2b hash of `key`. A longer turn
    begins with the numbers of a shorter one. They are the same in every process and numpy version.
    """
    text = ascii([part if isinstance(part, str) else int(part) for part in key])
    seed = int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    bits = np.random.Philox(key=seed).random_raw(count)
    return (bits >> np.uint64(11)) * np.float64(2.0**-53)


class Draws(NamedTuple):
    """Which steps the draws of a batch need. True can only cost time, so rows of all kinds may be mixed."""

    greedy: bool = True
    sampled: bool = True
    scaled: bool = True
    truncated: bool = True


def draw(logits: Tensor, numbers: Tensor, draws: Draws) -> Tensor:
    """(2, B) float64: one token for each row of `logits` (B, V), and its log-prob.

    `numbers` (3, B) float64 are the uniform, the temperature and top-p of each row. Temperature 0 takes the
    largest logit. The log-prob is log_softmax(logits / temperature) in float32 (temperature 1 for greedy
    rows), before top-p. Nothing is read back from a GPU.
    """
    uniform, temperature, top_p = numbers
    logits = logits.float()
    if draws.scaled:
        scaled = logits / torch.where(temperature == 0, 1.0, temperature).float()[:, None]
    else:
        scaled = logits
    logprobs = torch.log_softmax(scaled, dim=-1)  # (B, V)
    tokens = logits.argmax(-1) if draws.greedy else None
    if draws.sampled:
        probs = logprobs.exp()
        sampled = _invert(_truncate(probs, top_p[:, None]) if draws.truncated else probs, uniform[:, None])
        tokens = sampled if tokens is None else torch.where(temperature == 0, tokens, sampled)
    assert tokens is not None, "rows are greedy or sampled"
    return torch.stack([tokens.double(), logprobs.gather(-1, tokens[:, None])[:, 0].double()])


def _truncate(probs: Tensor, limit: Tensor) -> Tensor:
    """`probs`, 0 outside the smallest set of most likely tokens with `limit` (B, 1) of the mass.

    Tokens as likely as the least likely of the set stay too, so the order of equals does not matter.
    """
    ordered = torch.sort(probs, dim=-1, descending=True).values
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered  # (B, V), mass of likelier tokens
    least = ordered.masked_fill(before >= limit, torch.inf).amin(-1, keepdim=True)
    return torch.where((probs >= least) | (limit >= 1), probs, 0.0)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds uniform × total; it never has weight 0.

    A large vocabulary is searched in two steps: which block of tokens, by the blocks' sums, and which token
    in it. Only the sums and one block are added up in float64.
    """
    batch, vocabulary = weights.shape
    if vocabulary <= 16 * BLOCK:
        return _search(weights, uniforms)[0]
    blocks = torch.nn.functional.pad(weights, (0, -vocabulary % BLOCK)).view(batch, -1, BLOCK)
    places, uniforms_inside = _search(blocks.sum(-1), uniforms)
    block = blocks[torch.arange(batch, device=weights.device), places]
    return (places * BLOCK + _search(block, uniforms_inside)[0]).clamp_(max=vocabulary - 1)


def _search(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """(the first index (B,) whose cumulative weight exceeds uniform × total, how far into it that is (B, 1)).

    The second is a number in [0, 1): a uniform for what is inside that index.
    """
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # (B, N)
    total = cumulative[:, -1:]
    thresholds = torch.minimum(uniforms * total, total * (1 - 2.0**-52))  # rounding must not reach the total
    index = torch.searchsorted(cumulative, thresholds, right=True).clamp_(max=weights.shape[-1] - 1)
    weight = weights.gather(-1, index)
    inside = (thresholds - cumulative.gather(-1, index)) / weight + 1
    return index[:, 0], inside.clamp_(0, 1)
