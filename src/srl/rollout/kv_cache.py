"""A key-value cache with one slot for each episode, kept between the episode's turns.

A forward pass writes every new key and value at its slot and position; padding goes to a spare slot. Nothing
is ever moved: slots are read where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

BLOCK = 64
"""Slots grow by whole blocks of positions."""

Span = tuple[slice, slice, int]
"""(rows of the batch, the slots that they have, width): neighbours, read in place up to `width` positions."""


class CacheAccess:
    """Where one forward pass writes in the cache and what it reads; shared by all layers.

    `slot` and `position` (B, Q) are the places of the new keys; slot number `slots` is the spare one.
    `rows` (B,) are the slots to attend to, `past` positions at most, `width` with the new ones; with `spans`
    they are read in place. With `past` 0 the new keys are all there is, and none are read.
    """

    def __init__(self, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        self.slot = self.position = torch.zeros((0, 0), dtype=torch.long)
        self.rows = torch.zeros(0, dtype=torch.long)
        self.spans: list[Span] = []
        self.caps_scores = True
        """Whether the model's own attention caps its scores where it is told to; sdpa does not."""
        self.width = self.past = 0
        self._places: dict[int, Tensor] = {}

    def set(
        self, slot: Tensor, position: Tensor, rows: Tensor, width: int, past: int, spans: Sequence[Span] = ()
    ) -> None:
        """Say what the next forward reads and writes."""
        self.slot, self.position, self.rows, self.width, self.past = slot, position, rows, width, past
        self.spans = list(spans)
        self._places.clear()

    def places(self, heads: int) -> Tensor:
        """(B × heads × Q,) where new keys go in a buffer (slots, heads, capacity), taken as flat."""
        if heads not in self._places:
            head = torch.arange(heads, device=self.slot.device)[:, None]
            flat = (self.slot[:, None] * heads + head) * self.capacity + self.position[:, None]
            self._places[heads] = flat.reshape(-1)
        return self._places[heads]


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each (slots + 1, heads, capacity, dim)."""

    is_sliding = False
    keys: Tensor  # from lazy_initialization on
    values: Tensor

    def __init__(self, access: CacheAccess) -> None:
        super().__init__()
        self.access = access

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, as zeros: attention multiplies masked values by 0, and 0 × NaN is NaN."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._buffer(key_states), self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros((self.access.slots + 1, like.shape[1], self.access.capacity, like.shape[3]))

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write keys and values (B, heads, Q, dim); return those to attend to (…, heads, T, dim)."""
        if not self.is_initialized or self.device != key_states.device or self.dtype != key_states.dtype:
            self.lazy_initialization(key_states, value_states)
        return self._exchange(self.keys, key_states), self._exchange(self.values, value_states)

    def _exchange(self, buffer: Tensor, states: Tensor) -> Tensor:
        access, (_, heads, _, dim) = self.access, states.shape
        buffer.view(-1, dim).index_copy_(0, access.places(heads), states.reshape(-1, dim))
        if not access.past:
            return states
        return buffer if access.spans else buffer[:, :, : access.width].index_select(0, access.rows)

    def grow(self) -> None:
        """Copy the stored keys and values into buffers of the new capacity."""
        old_keys, old_values = self.keys, self.values
        self.lazy_initialization(old_keys, old_values)
        self.keys[:, :, : old_keys.shape[2]] = old_keys
        self.values[:, :, : old_values.shape[2]] = old_values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.access.width, 0

    def get_seq_length(self) -> int:
        return self.access.past

    def get_max_length(self) -> int:
        return self.access.capacity

    def get_max_cache_shape(self) -> int:
        """The name of `get_max_length` in older releases of transformers."""
        return self.access.capacity


class SlotCache(Cache):
    """`slots` rows of keys and values that grow together up to `max_length` positions, or are `static`."""

    def __init__(self, slots: int, max_length: int, *, static: bool = False) -> None:
        self.max_length = max_length
        self.access = CacheAccess(slots, _blocks(max_length if static else min(max_length, 4 * BLOCK)))
        make_layer: Any = partial(SlotLayer, self.access)  # transformers calls it as if it were the class
        super().__init__(layer_class_to_replicate=make_layer)

    def reserve(self, length: int) -> None:
        """Make room for `length` positions in every slot. Capacity doubles, so growth is rare."""
        if length > self.access.capacity:
            self.access.capacity = _blocks(max(length, min(2 * self.access.capacity, self.max_length)))
            for layer in self._made():
                layer.grow()

    def copy(self, source: Tensor, target: Tensor, length: int) -> None:
        """Give the slots `target` (N,) the first `length` positions of the slots `source` (N,)."""
        for layer in self._made():
            for buffer in (layer.keys, layer.values):
                buffer[target, :, :length] = buffer[source, :, :length]

    def _made(self) -> list[SlotLayer]:
        """The layers with buffers; a model may skip some."""
        return [layer for layer in self.layers if isinstance(layer, SlotLayer) and layer.is_initialized]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self._made())

    def release(self) -> None:
        """Free the memory; the next forward starts with empty buffers."""
        self.layers.clear()


def _blocks(length: int) -> int:
    return -(-length // BLOCK) * BLOCK
