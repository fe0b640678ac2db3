"""Packing: the rows of a batch behind each other as one sequence without padding, attention within each row.

Rows that begin alike, as the episodes of a group do, share those tokens: they are in the sequence once, and
only the attention sees them in every row. The states are those of separate rows, since a token's state
depends on nothing but the tokens before it.

A model packs where its attention is transformers' `sdpa`. It then gets an attention function of ours, which
is `sdpa` itself until a batch is packed. What a packed batch consists of travels as its attention mask, which
transformers hands to every layer unchanged if it has four dimensions: an int32 tensor (`Layout.as_mask`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from srl.models.check import Probe, attempt, probe, probe_length
from srl.update import block_attention
from srl.update.batch import Batch, micro_batches, row_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "srl_packed"
"""The name of `packed_attention` among transformers' attention implementations."""
SHARED_COST = 0.25
"""What a token that a row shares with an earlier one takes of a token's memory, at most in usual decoders:
attention has a query, keys, values and an output for it in each row."""
IGNORED = frozenset({"position_ids", "use_cache", "output_attentions", "cache_position", "is_causal"})
"""What layers pass to their attention that says nothing about which token sees which."""

_packs: WeakKeyDictionary[PreTrainedModel, dict[int, bool]] = WeakKeyDictionary()


def try_packing(trunk: PreTrainedModel, longest: int) -> bool:
    """Give the trunk our attention, where packed rows of at most `longest` tokens then get the states of rows
    alone; whether it has it. Probed once."""
    tested, length = _packs.setdefault(trunk, {}), probe_length(trunk, longest)
    if length not in tested:
        tested[length] = _try_attention(trunk, longest)
    return tested[length]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the N real tokens of a batch, row after row, are in a sequence of M ≤ N tokens.

    `places` (N,) has the token's index in the sequence, `first` (M,) the first of the N that is there.
    """

    lengths: Tensor  # (B,) of the rows
    places: Tensor  # (N,) int32
    first: Tensor  # (M,) int32

    @classmethod
    def of(cls, batch: Batch) -> Layout:
        """The layout in which rows that begin alike share those tokens."""
        lengths = batch.lengths.tolist()
        ends = torch.tensor(lengths).cumsum(0).tolist()
        places = torch.empty(sum(lengths), dtype=torch.int32)
        first, before = list[Tensor](), torch.empty(0, dtype=torch.int32)
        for row, shared in shared_prefixes(batch):
            start, new = ends[row] - lengths[row], sum(map(len, first))
            own = torch.arange(new, new + lengths[row] - shared, dtype=torch.int32)
            before = torch.cat([before[:shared], own])
            places[start : ends[row]] = before
            first.append(torch.arange(start + shared, ends[row], dtype=torch.int32))
        device = batch.input_ids.device
        return cls(batch.lengths, places.to(device), torch.cat(first).to(device))

    @property
    def shares(self) -> bool:
        return len(self.first) < len(self.places)

    def as_mask(self, exact: bool = False) -> Tensor:
        """(1 or, if `exact`, 2; B; longest; ·) int32: where each row starts and the last ends, and, if rows
        share tokens, `places` and `first`. The other dimensions take no memory, and nobody has to read from
        the device to know them."""
        starts = nn.functional.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)
        parts = [starts, self.places, self.first] if self.shares else [starts]
        return torch.cat(parts).expand(1 + exact, len(self.lengths), int(self.lengths.max()), -1)


def shared_prefixes(batch: Batch) -> list[tuple[int, int]]:
    """The rows in an order in which those that begin alike are neighbours, each with the number of tokens
    that it shares with the one before it. None shares more with an earlier row. Without shared tokens the
    order is that of the batch."""
    rows = [
        ids[:length] for ids, length in zip(batch.input_ids.tolist(), batch.lengths.tolist(), strict=True)
    ]
    order = sorted(range(len(rows)), key=rows.__getitem__)
    shared = [0, *(_shared(rows[a], rows[b]) for a, b in pairwise(order))]
    return list(zip(order, shared, strict=True)) if any(shared) else [(row, 0) for row in range(len(rows))]


def _shared(ids: Sequence[int], other_ids: Sequence[int]) -> int:
    """How many ids both begin with."""
    return next(
        (place for place, (a, b) in enumerate(zip(ids, other_ids, strict=False)) if a != b),
        min(len(ids), len(other_ids)),
    )


def packed_micro_batches(trunk: PreTrainedModel, batch: Batch, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` tokens of a forward pass, with the padding if it pads."""
    packed = try_packing(trunk, batch.input_ids.shape[1])
    return rows_within(batch, max_tokens) if packed else micro_batches(batch.lengths, max_tokens)


def rows_within(batch: Batch, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` tokens; rows that begin alike together.

    A token counts once, and `SHARED_COST` in each further row that shares it. A row with more tokens than
    that is a group of its own.
    """
    group, tokens, lengths = list[int](), 0.0, batch.lengths.tolist()
    for row, shared in shared_prefixes(batch):
        cost = lengths[row] - (1 - SHARED_COST) * shared
        if group and tokens + cost > max_tokens:
            yield torch.tensor(group)
            group, tokens, cost = [], 0.0, lengths[row]
        tokens += cost
        group.append(row)
    if group:
        yield torch.tensor(group)


def packed_states(trunk: PreTrainedModel, batch: Batch, exact: bool = False) -> Tensor:
    """The trunk's states (N, D) at the N real tokens of the batch, row after row.

    `exact` attention keeps its scores in float32, as the sampler's does, also where that is slower.
    """
    real, layout = batch.attention_mask != 0, Layout.of(batch)  # (B, T)
    positions = torch.arange(real.shape[1], device=real.device).expand_as(real)
    inputs = {
        "input_ids": batch.input_ids[real][layout.first][None], "use_cache": False,
        "position_ids": positions[real][layout.first][None], "attention_mask": layout.as_mask(exact),
    }  # fmt: skip
    out = attempt(trunk, lambda: trunk(**inputs))
    states: Tensor = out.last_hidden_state[0]
    return states.index_select(0, layout.places) if layout.shares else states


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed batch: (1, H, M, E) -> (1, M, H, E).

    With any other mask it is transformers' `sdpa`. Raises ValueError for an attention with more to it, such
    as a sliding window or dropout.
    """
    if attention_mask is None or attention_mask.dtype != torch.int32:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    unsupported = {name: option for name, option in options.items() if name not in IGNORED}
    if names := [name for name, option in unsupported.items() if isinstance(option, Tensor) or option]:
        raise ValueError(f"packed attention has no {', '.join(sorted(names))}")
    exact, starts, places, first = _parts_of(attention_mask, query.shape[2])
    if places is not None:
        query, key, value = (tensor.index_select(2, places) for tensor in (query, key, value))
    if query.is_cuda and query.dtype.itemsize == 2:
        out = _varlen(query, key, value, starts, attention_mask.shape[2], scaling)
    else:
        blocks = not exact and block_attention.pays_for(query)
        out = _row_by_row(query, key, value, starts, scaling, blocks)
    return (out if first is None else out.index_select(1, first)), None


def _parts_of(mask: Tensor, tokens: int) -> tuple[bool, Tensor, Tensor | None, Tensor | None]:
    """`exact`, row starts, `places` and `first` of a mask that `Layout.as_mask` has made."""
    parts, exact, end = mask[0, 0, 0], len(mask) == 2, mask.shape[1] + 1
    if len(parts) == end:
        return exact, parts, None, None
    return exact, parts[:end], parts[end:-tokens], parts[-tokens:]


def _row_by_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    scaling: float | None,
    blocks: bool,
) -> Tensor:
    """Causal attention within each row: (1, H, N, E) -> (1, N, H, E)."""
    lengths = [end - start for start, end in pairwise(starts.tolist())]
    rows = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    if blocks:
        outs = [block_attention.causal_attention(q[0], k[0], v[0], scaling)[None] for q, k, v in rows]
    else:
        grouped = query.shape[1] != key.shape[1]
        outs = [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
            for q, k, v in rows
        ]
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous()


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scaling: float | None
) -> Tensor:
    """The same in one kernel."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # (N, H, E)
    grouped: dict[str, Any] = {}
    if (heads := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # torch < 2.13
            key, value = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
    out: Any = varlen_attn(
        query, key, value, starts, starts, longest, longest,
        scale=scaling, window_size=(-1, 0), **grouped,
    )  # fmt: skip
    return out[None]


def _try_attention(trunk: PreTrainedModel, longest: int) -> bool:
    """Give the trunk our attention, and take it back where packed states are not those of rows alone."""
    config = trunk.config
    before = getattr(config, "_attn_implementation", None)
    if before not in ("sdpa", ATTENTION):
        return False
    _register()
    expected = probe(trunk, longest)
    config._attn_implementation = ATTENTION
    try:
        same = expected.wrong(_packed_ends(trunk, expected)) is None
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a model's own code does with inputs that it does not know
        same = False
    if not same:
        config._attn_implementation = before
    return same


@torch.no_grad()
def _packed_ends(trunk: PreTrainedModel, probe: Probe) -> Tensor:
    """(rows, K, D) The states at the ends of the probe's rows, packed."""
    lengths, count = [len(row) for row in probe.rows], probe.ends.shape[1]
    states = packed_states(trunk, row_batch(probe.rows, next(trunk.parameters()).device))
    return torch.stack([row[-count:] for row in states.split(lengths)])


@cache
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
