"""Packing: the rows of a batch behind each other as one sequence without padding, attention within each row.

A model packs where its attention is transformers' `sdpa`. It then gets an attention function of ours, which
is `sdpa` itself until a batch is packed. What a packed batch consists of travels as its attention mask, which
transformers hands to every layer unchanged if it has four dimensions: an int32 tensor of row starts.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from srl.model import evaluating
from srl.update.batch import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "srl_packed"
"""The name of `packed_attention` among transformers' attention implementations."""
IGNORED = frozenset({"position_ids", "use_cache", "output_attentions", "cache_position", "is_causal"})
"""What layers pass to their attention that says nothing about which token sees which."""

_packs: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()


def packs(trunk: PreTrainedModel) -> bool:
    """Whether packing gives the states of padding in this model; tested once with a small forward pass."""
    if trunk not in _packs:
        _packs[trunk] = _can_pack(trunk)
    return _packs[trunk]


def packed_states(trunk: PreTrainedModel, batch: Batch) -> Tensor:
    """The trunk's states (N, D) at the N real tokens of the batch, row after row."""
    real = batch.attention_mask != 0  # (B, T)
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    out = trunk(
        input_ids=batch.input_ids[real][None], position_ids=positions[real][None],
        attention_mask=_row_starts(batch.lengths), use_cache=False,
    )  # fmt: skip
    return out.last_hidden_state[0]


def _row_starts(lengths: Tensor) -> Tensor:
    """Where each row starts and the last ends, (1, 1, longest, B + 1) int32 without memory for `longest`."""
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    return starts.expand(1, 1, int(lengths.max()), -1)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch: (1, H, N, E) -> (1, N, H, E).

    With any other mask it is transformers' `sdpa`. Raises ValueError for an attention with more to it, such
    as a sliding window.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    others = {name: option for name, option in options.items() if name not in IGNORED}
    if asked := [name for name, option in others.items() if isinstance(option, Tensor) or option]:
        raise ValueError(f"packed attention has no {', '.join(sorted(asked))}")
    starts, longest = attention_mask[0, 0, 0], attention_mask.shape[2]
    if query.is_cuda and query.dtype.itemsize == 2 and not dropout:
        return _varlen(query, key, value, starts, longest, scaling), None
    lengths = [end - start for start, end in pairwise(starts.tolist())]
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    outs = [
        scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
        )
        for q, k, v in rows
    ]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """The same in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, E)
    out: Any = varlen_attn(
        query, key, value, starts, starts, longest, longest,
        scale=scaling, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return out[None]


def _can_pack(trunk: PreTrainedModel) -> bool:
    """Give the model our attention, and take it back where packed states are not those of padded rows."""
    config = trunk.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    known = getattr(config, "_attn_implementation", None) in ("sdpa", ATTENTION)
    if not known or kinds != {"full_attention"}:
        return False
    _register()
    config._attn_implementation = ATTENTION
    try:
        same = _gives_the_same(trunk)
    except Exception:  # whatever a model's own code does with inputs that it does not know
        same = False
    if not same:
        config._attn_implementation = "sdpa"
    return same


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


@torch.no_grad()
def _gives_the_same(trunk: PreTrainedModel) -> bool:
    """Whether three rows of 6, 3 and 5 ids get the same states packed as padded."""
    device = next(trunk.parameters()).device
    ids = (torch.arange(18, device=device) * 7 + 3).reshape(3, 6) % trunk.config.get_text_config().vocab_size
    real = torch.arange(6, device=device) < torch.tensor([[6], [3], [5]], device=device)
    ones = real.float()
    batch = Batch(ids, real.long(), ones, ones, ones)
    with evaluating(trunk):
        packed = packed_states(trunk, batch).float()
        padded = trunk(input_ids=ids, attention_mask=batch.attention_mask, use_cache=False)
    expected = padded.last_hidden_state[real].float()
    tolerance = 0.05 if next(trunk.parameters()).dtype.itemsize == 2 else 1e-3
    return packed.shape == expected.shape and bool((packed - expected).norm() <= tolerance * expected.norm())
