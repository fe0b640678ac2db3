"""The model's forward pass over the rows of a table, with a key-value cache or without one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from srl.errors import UserError, error_line
from srl.models.check import attempt, kept_logits
from srl.rollout.attention import slot_attention
from srl.rollout.decode_graphs import FEED_COST, DecodeGraphs
from srl.rollout.kv_cache import SlotCache, Span
from srl.rollout.sampling import Draws, draw
from srl.rollout.slot_table import Rows, SlotTable

PADDED_TOKENS = {"cpu": 4096, "cuda": 8192}
"""The most tokens in one forward pass, padding included, where rows have several new tokens."""
WIDTH_STEP = 16
"""Attention widths are rounded up to a multiple of this: kernels want alignment and few shapes."""

_log = logging.getLogger(__name__)


class Forward:
    """Feeds each row the ids that are known and not yet fed, and draws the next."""

    feed_cost = 1.0
    """What the start of a pass over several new ids costs, in decoding steps."""

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return 0

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        """Logits (B, V) float32 after the last known id of each row; the rows differ."""
        raise NotImplementedError

    def sample(self, table: SlotTable, rows: Rows) -> NDArray[np.float64]:
        """(2, B) the next token of each row, and its log-prob."""
        logits = self.feed(table, rows)
        inputs = torch.from_numpy(table.step_inputs(rows)).to(logits.device, non_blocking=True)
        pairs: NDArray[np.float64] = draw(logits, inputs[3:], table.draws(rows)).cpu().numpy()  # the one read
        return pairs

    def release(self) -> None:
        """Free the cache's memory."""


class CachedForward(Forward):
    """Feeds each row only its new ids; the keys and values of earlier ids are in its slot of a `SlotCache`.

    Rows with the same ids, as the samples of a prompt, are computed once. On a GPU a step in which every row
    has one new id is a CUDA graph, unless `graphs` is False or it cannot be captured. On a CPU such a step
    reads keys and values `in_place`, which a model's own attention does not understand.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        slots: int,
        max_length: int,
        *,
        graphs: bool | None = None,
        in_place: bool = True,
    ) -> None:
        self.model = model
        on_gpu = model.device.type == "cuda"
        static = on_gpu if graphs is None else graphs
        self.cache = SlotCache(slots, max_length, static=static)
        self._graphs = DecodeGraphs(self._step, model.device, spare=slots) if static else None
        self._in_place = in_place and not on_gpu
        if on_gpu and self._graphs is not None:
            self.feed_cost = FEED_COST
        self._head = head() if (head := getattr(model, "get_output_embeddings", None)) else None

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes

    def release(self) -> None:
        self.cache.release()
        if self._graphs is not None:
            self._graphs.clear()

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        with slot_attention(self.model, self.cache.access):
            if not table.is_decoding(rows):
                return self._prefill(table, rows)
            width = self._width(table.known[rows])
            inputs = torch.from_numpy(table.step_inputs(rows)).to(self.model.device)
            spans = self._spans(rows, table.known[rows]) if self._in_place else []
            return self._decode(inputs, width, spans)

    def sample(self, table: SlotTable, rows: Rows) -> NDArray[np.float64]:
        if self._graphs is not None and table.is_decoding(rows):
            try:
                with slot_attention(self.model, self.cache.access):
                    longest = int(table.known[rows].max())
                    return self._graphs.step(table.step_inputs(rows), longest, table.draws(rows))
            except (RuntimeError, UserError) as error:  # of a capture, or of the model in it
                _log.warning("decoding goes on without CUDA graphs: %s", error_line(error))
                self._graphs, self.feed_cost = None, 1.0
        return super().sample(table, rows)

    def _step(self, inputs: Tensor, width: int, draws: Draws) -> Tensor:
        """A whole decoding step, (2, B) from `SlotTable.step_inputs` (6, B): nothing is read from the GPU."""
        return draw(self._decode(inputs, min(width, self.cache.access.capacity)), inputs[3:], draws)

    def _decode(self, inputs: Tensor, width: int, spans: Sequence[Span] = ()) -> Tensor:
        ids, positions, slots = inputs[:3].long()[:, :, None]  # (B, 1) each
        self.cache.access.set(slots, positions, slots[:, 0], width, width - 1, spans)
        out = attempt(self.model, lambda: self.model(input_ids=ids, **self._options(positions)))
        return out.logits[:, -1].float()

    def _options(self, positions: Tensor) -> dict[str, Any]:
        return {"position_ids": positions, "past_key_values": self.cache, "use_cache": True}

    def _prefill(self, table: SlotTable, rows: Rows) -> Tensor:
        """Any number of new ids a row."""
        leaders, leader_of = _same_ids(table, rows)
        first = rows[leaders]
        new, fresh = (table.known - table.fed)[first], table.fed[first] == 0
        budget, shortest = PADDED_TOKENS["cpu"], 0.75
        if self.model.device.type == "cuda":  # there a pass is mostly launches
            budget, shortest = PADDED_TOKENS["cuda"], 0.0
        groups = [
            part[group]
            for part in (np.flatnonzero(fresh), np.flatnonzero(~fresh))
            for group in padded_groups(new[part], budget, shortest)
        ]
        logits = torch.cat([self._feed_together(table, first[group]) for group in groups])
        followers = np.setdiff1d(np.arange(len(rows)), leaders)
        if len(followers):
            pairs = [first[leader_of[followers]], rows[followers]]
            source, target = _to_device(pairs, logits.device)
            self.cache.copy(source, target, int(table.known[rows[followers]].max()))
        place = np.argsort(np.concatenate(groups))  # leader -> its row of `logits`
        return logits[torch.from_numpy(place[leader_of])]

    def _feed_together(self, table: SlotTable, rows: Rows) -> Tensor:
        """Logits (B, V) of one pass, padded on the right, where a causal model never looks.

        Padding repeats a row's last id and is stored in the spare slot.
        """
        access, lengths, fed = self.cache.access, table.known[rows], table.fed[rows]
        new = lengths - fed
        columns = np.arange(new.max())
        positions = np.minimum(fed[:, None] + columns, lengths[:, None] - 1)  # (B, Q)
        slots = np.where(columns < new[:, None], rows[:, None], access.slots)
        past = int(fed.max())
        width = self._width(lengths) if past else len(columns)
        ids, position, slot, row, column = _to_device(
            [table.ids[rows[:, None], positions], positions, slots, rows, new - 1], self.model.device
        )
        self.cache.reserve(int(lengths.max()))
        access.set(slot, position, row, width, past)
        batch = torch.arange(len(rows), device=row.device)
        with _picked(self._head, batch, column):
            out = attempt(self.model, lambda: self.model(input_ids=ids, **self._options(position)))
        return (out.logits[batch, column] if self._head is None else out.logits[:, 0]).float()

    def _width(self, lengths: Rows) -> int:
        self.cache.reserve(longest := int(lengths.max()))
        return min(-(-longest // WIDTH_STEP) * WIDTH_STEP, self.cache.access.capacity)

    def _spans(self, rows: Rows, lengths: Rows) -> list[Span]:
        """Neighbours in the cache, which are read in place, each up to its longest."""
        edges = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
        return [
            (slice(a, b), slice(int(rows[a]), int(rows[a]) + b - a), self._width(lengths[a:b]))
            for a, b in pairwise(edges)
        ]


def padded_groups(counts: Rows, budget: int, shortest: float) -> Iterator[Rows]:
    """Indices into `counts`, longest first, in groups of at most `budget` padded tokens.

    No member of a group is shorter than this share of the longest, so little of a group is padding.
    """
    order = np.argsort(-counts, kind="stable")
    first = 0
    for place, index in enumerate(order):
        longest = counts[order[first]]
        full = longest * (place + 1 - first) > budget or counts[index] < shortest * longest
        if place > first and full:
            yield order[first:place]
            first = place
    if len(order):
        yield order[first:]


def _same_ids(table: SlotTable, rows: Rows) -> tuple[Rows, Rows]:
    """The rows to compute, as indices into `rows`, and for each row the index of its leader among them.

    Rows with the same ids share a leader: a group's samples at their start, and while they write the same.
    """
    leader_by_ids: dict[bytes, int] = {}
    leaders: list[int] = []
    leader_of = np.empty(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        key = table.ids[row, : table.known[row]].tobytes()
        if key not in leader_by_ids:
            leader_by_ids[key] = len(leaders)
            leaders.append(index)
        leader_of[index] = leader_by_ids[key]
    return np.array(leaders), leader_of


@contextmanager
def _picked(head: torch.nn.Module | None, rows: Tensor, columns: Tensor) -> Iterator[None]:
    """Inside, the head gets its input (B, Q, D) at these places only, as (N, 1, D)."""
    if head is None:
        yield
        return
    handle = head.register_forward_pre_hook(lambda _, inputs: (inputs[0][rows, columns][:, None],))
    try:
        yield
    finally:
        handle.remove()


def _to_device(arrays: Sequence[Rows], device: torch.device) -> list[Tensor]:
    """The arrays on `device`, by a single transfer."""
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


class PlainForward(Forward):
    """Recomputes every sequence for each token: slow, and correct for any causal model.

    Padding is on the right, where a causal model never looks, so no mask is needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        lengths = table.known[rows]
        positions = np.minimum(
            np.arange(lengths.max())[None], lengths[:, None] - 1
        )  # pads repeat the last id
        ids = torch.from_numpy(table.ids[rows[:, None], positions]).to(self.model.device)
        spread = int(lengths.max() - lengths.min())
        keywords = kept_logits(self.model, spread + 1)
        output = attempt(self.model, lambda: self.model(input_ids=ids, use_cache=False, **keywords))
        last = torch.from_numpy(lengths - lengths.max() - 1).to(ids.device)  # (B,), counted from the end
        return output.logits[torch.arange(len(rows), device=ids.device), last].float()
