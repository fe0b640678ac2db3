"""Attention for the rollout: keys and values are read as they are stored, once for each key-value head.

transformers' own attention repeats them for every query head as soon as there is a mask. The function here is
registered with its `AttentionInterface` and is in use only inside `grouped_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

NAME = "srl_grouped"
Bucket = tuple[int, int, int]
"""(first row, row after the last, width): rows of a batch that attend to the same number of positions."""
ON_GPUS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which torch prefers on an H100: it plans for each shape, and most steps have a new one."""


def grouped_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    buckets: Sequence[Bucket] = (),
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of `query` (B, H, Q, D) to `key` and `value` (B, H / G, T, D); returns (B, Q, H, D).

    Without a mask it is causal. For one query a row the G heads that share a key-value head go together, as
    if they were G queries. `buckets` split the batch, so that short rows do not read the width of long ones.
    Raises NotImplementedError where a layer wants more than this.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise NotImplementedError(f"attention with {', '.join(unknown)}")
    if attention_mask is None:
        out = scaled_dot_product_attention(query, key, value, scale=scaling, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2), None
    batch, heads, length, dim = query.shape
    if length > 1:
        if query.is_cuda:  # the fused kernels that take a mask do not group heads
            key, value = (tensor.repeat_interleave(heads // key.shape[1], dim=1) for tensor in (key, value))
        out = scaled_dot_product_attention(
            query, key, value, attention_mask, scale=scaling, enable_gqa=key.shape[1] != heads
        )
        return out.transpose(1, 2), None
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    parts = [
        scaled_dot_product_attention(
            grouped[first:last], key[first:last, :, :width], value[first:last, :, :width],
            attention_mask[first:last, ..., :width], scale=scaling,
        )
        for first, last, width in buckets or [(0, batch, key.shape[2])]
    ]  # fmt: skip
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(NAME, grouped_attention_forward)


@contextmanager
def grouped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the layers of `model` that use transformers' interface attend with the function above."""
    config: Any = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        with sdpa_kernel(ON_GPUS) if model.device.type == "cuda" else nullcontext():
            yield
    finally:
        config._attn_implementation = before
