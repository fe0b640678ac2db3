"""Causal attention as matrix products of blocks, for CPUs that multiply bfloat16 but have no AMX.

There PyTorch's flash attention multiplies bfloat16 through float32. The products here are oneDNN's, as those
of the linear layers are. Forward and backward of a row of 300 tokens (9 heads of 64, 3 of keys) take 4.5 ms
instead of 10.0, of 1,000 tokens 29 instead of 57. Scores are rounded to bfloat16: the relative error of
outputs and gradients is .009 instead of .006. The sampler keeps them in float32, so under a head in float32
(`model.cast_lm_head_to_fp32`) the trainer does too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 128
"""Queries of a block. Its scores, of all heads and of all keys up to it, are in memory at one time."""


def pays_for(query: Tensor) -> bool:
    """Whether this attention is faster than PyTorch's for these queries."""
    return query.device.type == "cpu" and query.dtype == torch.bfloat16 and _multiplies_bfloat16()


@cache
def _multiplies_bfloat16() -> bool:
    """Whether the CPU has products of bfloat16, and no AMX, with which flash attention is fast too."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float | None = None) -> Tensor:
    """Causal attention of queries (H, L, E) to keys and values (H / G, L, E); returns (H, L, E).

    The G heads that share keys are multiplied as if they were G times as many queries. `scaling` is 1 / √E
    unless given.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out: Tensor = _BlockAttention.apply(query, key, value, scale)
    return out


class _BlockAttention(torch.autograd.Function):
    """The backward pass computes the weights of a block again, so that none are kept (FlashAttention,
    arXiv 2205.14135, algorithm 4)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        scaled = _grouped(query * scale, key)
        out = torch.empty_like(scaled)
        for block in _blocks(key):
            weights = _weights(_rows(scaled, block), key, block)
            out[:, :, block] = (weights @ value[:, : block.stop]).view_as(out[:, :, block])
        ctx.save_for_backward(query, key, value, out)
        ctx.scale = scale
        return out.view_as(query)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out = ctx.saved_tensors
        scaled, of_out = _grouped(query * ctx.scale, key), _grouped(of_out, key)
        of_query = torch.empty_like(scaled)
        of_key, of_value = (torch.zeros_like(key, dtype=torch.float32) for _ in range(2))
        means = (of_out * out).sum(-1, keepdim=True)  # of the weights' gradients, by the weights
        for block in _blocks(key):
            rows, errors, end = _rows(scaled, block), _rows(of_out, block), block.stop
            weights = _weights(rows, key, block)
            of_value[:, :end] += weights.transpose(1, 2) @ errors
            of_scores = (errors @ value[:, :end].transpose(1, 2)).sub_(_rows(means, block)).mul_(weights)
            of_key[:, :end] += of_scores.transpose(1, 2) @ rows
            of_query[:, :, block] = (of_scores @ key[:, :end]).view_as(of_query[:, :, block])
        return (of_query * ctx.scale).view_as(query), of_key.to(key.dtype), of_value.to(value.dtype), None


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """(H, L, ·) -> (H / G, G, L, ·)."""
    return query.reshape(len(key), -1, *query.shape[1:])


def _blocks(key: Tensor) -> Iterator[slice]:
    """The positions of each block of queries."""
    length = key.shape[1]
    return (slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def _rows(grouped: Tensor, block: slice) -> Tensor:
    """A block of (H / G, G, L, ·) as (H / G, G × block, ·)."""
    return grouped[:, :, block].flatten(1, 2)


def _weights(rows: Tensor, key: Tensor, block: slice) -> Tensor:
    """The weights (H / G, G × block, end of the block) of a block's queries."""
    scores = rows @ key[:, : block.stop].transpose(1, 2)
    own = scores.view(len(key), -1, block.stop - block.start, block.stop)[..., block]
    own.masked_fill_(torch.ones(own.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1)
