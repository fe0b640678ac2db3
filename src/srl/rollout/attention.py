"""Attention over the slots of the rollout's cache, with the masks that the model itself asks for.

Both functions are registered with transformers' interfaces and are in use only inside `slot_attention`. A
sliding window or a chunk is part of the mask that a layer asks for, so every layer can share one cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from srl.rollout.kv_cache import CacheAccess

NAME = "srl_slots"
ON_GPUS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's, which torch prefers on an H100: it plans for each shape, and most steps have a new one."""
_access: ContextVar[CacheAccess] = ContextVar("access")


def slot_mask(
    batch_size: int, kv_length: int, mask_function: Callable[..., Tensor], dtype: torch.dtype,
    device: torch.device, **_: Any,
) -> Tensor | None:  # fmt: skip
    """What is added to the scores, (B, 1, Q, T): `mask_function` at the positions of the queries.

    None for new rows of a layer that sees everything before: `attend` is causal then.
    """
    access = _access.get()
    if not access.past and mask_function is causal_mask_function:
        return None
    places = torch.arange(kv_length, device=device)
    rows = torch.arange(batch_size, device=device)[:, None, None, None]
    visible = mask_function(rows, places[:1], access.position[:, None, :, None], places)
    mask = torch.full(visible.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(visible, 0.0)


def attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of `query` (B, H, Q, D) to `key` and `value` (B, H / G, T, D); returns (B, Q, H, D).

    The G heads that share a key-value head go together, as if they were G queries, so keys and values are
    read once, where they are stored. Raises NotImplementedError where a layer wants more than this.
    """
    if more.get("position_bias") is not None:
        raise NotImplementedError("attention with position_bias")
    heads, length = query.shape[1:3]
    access, groups = _access.get(), heads // key.shape[1]
    if not access.caps_scores:
        softcap = None
    if softcap is not None or s_aux is not None:
        kernel: Callable[..., Tensor] = _capped(length, softcap, s_aux)
    elif attention_mask is None or length > 1:
        kernel = _fused
    else:
        kernel = _folded
    parts = [
        kernel(query[rows], key[slots, :, :width], value[slots, :, :width], scaling,
               None if attention_mask is None else attention_mask[rows, ..., :width], groups)
        for rows, slots, width in access.spans or [(slice(None), slice(None), key.shape[2])]
    ]  # fmt: skip
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.transpose(1, 2), None


def _fused(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None, groups: int
) -> Tensor:
    """PyTorch's own, causal without a mask."""
    if mask is not None and query.is_cuda:  # the fused kernels that take a mask do not group heads
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, is_causal=mask is None, enable_gqa=grouped
    )


def _folded(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None, groups: int
) -> Tensor:
    """One query a row: its heads are the queries."""
    batch, heads, _, dim = query.shape
    folded = query.reshape(batch, heads // groups, groups, dim)
    return scaled_dot_product_attention(folded, key, value, mask, scale=scaling).reshape(batch, heads, 1, -1)


def _capped(length: int, softcap: float | None, sinks: Tensor | None) -> Callable[..., Tensor]:
    """Attention whose scores are capped (Gemma 2) or share their mass with a sink for each head (gpt-oss)."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, scaling: float | None, mask: Tensor | None, groups: int
    ) -> Tensor:
        batch, heads, _, dim = query.shape
        split = query.reshape(batch, heads // groups, groups, length, dim)
        scores = split @ key[:, :, None].transpose(-1, -2) * (dim**-0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if mask is None:
            later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
            scores = scores.masked_fill(later, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask[:, :, None]
        if sinks is not None:
            sink = sinks.view(1, -1, groups, 1, 1).expand(batch, -1, -1, length, 1)
            scores = torch.cat([scores, sink.to(scores.dtype)], -1)
        probs = scores.float().softmax(-1).to(value.dtype)[..., : key.shape[2]]
        return (probs @ value[:, :, None]).reshape(batch, heads, length, -1)

    return kernel


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, slot_mask)


@contextmanager
def slot_attention(model: PreTrainedModel, access: CacheAccess) -> Iterator[None]:
    """Inside, the layers of `model` that use transformers' interfaces attend to the slots of `access`."""
    config: Any = model.config.get_text_config()
    before, token = config._attn_implementation, _access.set(access)
    access.caps_scores = before != "sdpa"
    config._attn_implementation = NAME
    try:
        with sdpa_kernel(ON_GPUS) if model.device.type == "cuda" else nullcontext():
            yield
    finally:
        config._attn_implementation = before
        _access.reset(token)
