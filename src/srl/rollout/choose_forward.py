"""Which forward pass the torch engine generates with: a cached one where a probe shows that it is right.

The probe feeds a few ids to the model with and without a key-value cache, and compares the logits.
"""

from __future__ import annotations

import logging
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from srl.errors import UserError
from srl.rollout.cached_forward import CachedForward, PlainForward
from srl.rollout.engine import Sampling
from srl.rollout.slot_table import Rows, SlotTable

PROMPTS = (5, 11)
"""Lengths of the probe's two prompts."""
STEPS = (0, 1, 2, 6)
"""Ids known after each prompt at the probe's steps: none, two single ids, then a span."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-2, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The largest difference of logits that counts as rounding, in units of their standard deviation."""

_log = logging.getLogger(__name__)


class Forward(Protocol):
    """Feeds the ids that are known and not yet fed."""

    def feed(self, table: SlotTable, rows: Rows) -> Tensor: ...

    @property
    def nbytes(self) -> int: ...

    def release(self) -> None: ...


def choose_forward(model: PreTrainedModel, slots: int, max_length: int) -> Forward:
    """A cached forward whose logits equal those of a full one, if possible with grouped attention.

    Otherwise the plain one, and a warning. Raises UserError for flash attention, which cannot take its place.
    """
    reason: str | None = None
    for grouped in (True, False):
        reason = _why_not(model, max_length, grouped)
        if reason is None:
            return CachedForward(model, slots, max_length, grouped=grouped)
        _log.debug("no cache with grouped=%s for %s: %s", grouped, type(model).__name__, reason)
        own: str = getattr(model.config.get_text_config(), "_attn_implementation", None) or ""
        if own.startswith("flash_attention"):
            raise UserError(
                f"{type(model).__name__} cannot generate with {own}: {reason}; "
                "set model.attn_implementation=sdpa"
            )
    _log.warning(
        "%s runs without a key-value cache, so every token recomputes its whole sequence: %s",
        type(model).__name__,
        reason,
    )
    return PlainForward(model)


def _why_not(model: PreTrainedModel, max_length: int, grouped: bool) -> str | None:
    """Why a cached forward would be wrong for this model; None where its logits are right."""
    try:
        with torch.no_grad():
            return _window(model, max_length) or _mismatch(model, max_length, grouped)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises at a cache that it does not know
        return f"{type(error).__name__}: {error}".splitlines()[0]


def _window(model: PreTrainedModel, max_length: int) -> str | None:
    """Why this model's attention window rules the cache out; None where it attends to everything."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds - {"sliding_attention", "chunked_attention"}:
        return f"layers of type {', '.join(sorted(kinds))}"
    for name in ("sliding_window", "attention_chunk_size"):
        window = getattr(config, name, None)
        if window is not None and window < max_length:
            return f"{name}={window} is less than the {max_length} tokens that an episode may have"
    return None


def _mismatch(model: PreTrainedModel, max_length: int, grouped: bool) -> str | None:
    """How the logits with and without the cache differ over the probe's steps; None where they agree."""
    prompts = [min(length, max(1, max_length - STEPS[-1])) for length in PROMPTS]
    cached = CachedForward(model, 2, max(prompts) + STEPS[-1], grouped=grouped)
    plain = PlainForward(model)
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
    """Root mean square difference in units of the logits' standard deviation.

    0 where `theirs` are not finite: that is not the cache's fault, and the first turn reports it.
    """
    if not bool(theirs.isfinite().all()):
        return 0.0
    ratio = (ours - theirs).square().mean().sqrt() / theirs.std().clamp_min(1e-12)
    return float(ratio.nan_to_num(nan=float("inf")))
