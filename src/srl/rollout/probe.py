"""Whether a model may run with our cache: what its config says, then what its logits say."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from srl.rollout.engine import Sampling
from srl.rollout.forward import CachedForward, Forward, PlainForward
from srl.rollout.slots import SlotTable

_log = logging.getLogger(__name__)

PROMPTS = (5, 11)
"""Lengths of the two prompts of the probe …"""
STEPS = (0, 1, 2, 6)
"""… and how much is known after them at each of its steps: two single ids, then a span."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The largest difference of logits, relative to their spread, that is put down to rounding."""


def choose_forward(model: PreTrainedModel, slots: int, max_length: int) -> Forward:
    """A cached forward where it gives the logits of a full one, else the plain one and a warning."""
    try:
        with torch.no_grad():
            reason = _window(model, max_length) or _mismatch(model, max_length)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises at a cache that it does not know
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if reason is None:
        return CachedForward(model, slots, max_length)
    _log.warning(
        "%s runs without a key-value cache, every token computes its whole sequence again: %s",
        type(model).__name__,
        reason,
    )
    return PlainForward(model)


def _window(model: PreTrainedModel, max_length: int) -> str | None:
    """Why attention that forgets or compresses cannot use our cache; None where nothing is forgotten."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention", "chunked_attention"}:
        return f"layers of type {', '.join(sorted(kinds))}"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < max_length:
            return f"{name}={window} is below the {max_length} tokens that an episode may have"
    return None


def _mismatch(model: PreTrainedModel, max_length: int) -> str | None:
    """How logits with the cache and without differ, over the probe's steps; None where they agree."""
    prompts = [min(length, max(1, max_length - STEPS[-1])) for length in PROMPTS]
    cached, plain = CachedForward(model, 2, max(prompts) + STEPS[-1]), PlainForward(model)
    vocabulary = model.config.get_text_config().vocab_size
    ids = np.random.Generator(np.random.Philox(0)).integers(0, vocabulary, (2, max(prompts) + STEPS[-1]))
    table, worst = SlotTable(2), 0.0
    limit = TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    for extra in STEPS:
        for row, length in enumerate(prompts):
            table.begin(row, ids[row, : length + extra].tolist(), Sampling(max_tokens=1), 0)
        rows = np.arange(2)
        worst = max(worst, _difference(cached.feed(table, rows), plain.feed(table, rows)))
        table.fed[:] = table.known
    if worst > limit:
        return f"its logits with a cache differ from those without by {worst:.2g} of their spread"
    return None


def _difference(ours: Tensor, theirs: Tensor) -> float:
    """Root mean square difference, in units of the standard deviation of the logits."""
    ratio = (ours - theirs).square().mean().sqrt() / theirs.std().clamp_min(1e-12)
    return float(ratio.nan_to_num(nan=float("inf")))
