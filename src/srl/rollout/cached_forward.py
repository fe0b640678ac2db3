"""The model's forward pass over the rows of a table, with a key-value cache or without one.

Both kinds give the logits after the last known id of each row, `feed(table, rows) -> (B, V)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from srl.probe import attempt, kept_logits
from srl.rollout.attention import Bucket, grouped_attention
from srl.rollout.kv_cache import SlotCache, Stored
from srl.rollout.slot_table import Rows, SlotTable

PADDED_TOKENS = 4096
"""The most tokens in one forward pass, padding included, where rows have several new tokens."""
WIDTH_STEP = 16
"""Attention widths are rounded up to a multiple of this: kernels want alignment and few shapes."""
LENGTHS = tuple(int(256 * 1.5**power) for power in range(20))
"""Rows between two of these lengths attend together, so none reads much more than 1.5 times its own."""
REUSED = 16
"""The fewest ids for which a row copies another's keys and values instead of computing them again."""
LED = 256
"""The fewest ids that must be saved for new rows to have their common beginning computed first."""


class SlotAssignment:
    """Which row of the table has which slot of the cache.

    If there are fewer slots than rows, the inactive row that was fed longest ago loses its slot to another;
    its keys and values are kept in host memory.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.slot_of: dict[int, int] = {}  # the row fed longest ago first
        self.stored: dict[int, Stored] = {}

    def slots(self, rows: Rows) -> Rows:
        return np.array([self.slot_of[row] for row in rows.tolist()], dtype=np.int64)

    def assign(self, table: SlotTable, rows: Rows) -> None:
        """Give each of `rows` a slot, and copy back the keys and values that were kept for it."""
        for row in [row for row in (*self.slot_of, *self.stored) if not table.known[row]]:
            self.slot_of.pop(row, None)  # its episode has ended
            self.stored.pop(row, None)
        wanted = rows.tolist()
        slots = {row: self.slot_of.pop(row) for row in wanted if row in self.slot_of}
        if len(slots) < len(wanted):
            used = {*slots.values(), *self.slot_of.values()}
            free = (slot for slot in range(self.cache.access.slots) if slot not in used)
            for row in wanted:
                if row not in slots:
                    slot = next(free, None)
                    slots[row] = self._take_slot(table) if slot is None else slot
                    self._restore(table, row, slots[row])
        self.slot_of |= {row: slots[row] for row in wanted}

    def _take_slot(self, table: SlotTable) -> int:
        row = next(row for row in self.slot_of if not table.active[row])
        slot = self.slot_of.pop(row)
        self.stored[row] = self.cache.take(slot, int(table.fed[row]))
        return slot

    def _restore(self, table: SlotTable, row: int, slot: int) -> None:
        stored = self.stored.pop(row, None)
        if stored is not None and table.fed[row]:
            self.cache.put(slot, stored)

    def move(self, table: SlotTable, rows: Rows, slots: Rows) -> None:
        """Move `rows` to `slots`; the rows that were there go to the slots that become free."""
        old = self.slots(rows)
        moved = old != slots
        if not moved.any():
            return
        source, target = old[moved].tolist(), slots[moved].tolist()
        vacated = sorted(set(source) - set(target))
        goes_to = dict(zip(sorted(set(target) - set(source)), vacated, strict=True))
        displaced = [row for row, slot in self.slot_of.items() if slot in goes_to]
        source += [self.slot_of[row] for row in displaced]
        target += [goes_to[self.slot_of[row]] for row in displaced]
        longest = table.fed[[*rows[moved].tolist(), *displaced]].max()
        self.slot_of.update({row: goes_to[self.slot_of[row]] for row in displaced})
        self.slot_of.update(zip(rows.tolist(), slots.tolist(), strict=True))
        self.cache.copy(source, target, int(longest))


class CachedForward:
    """Feeds each row only its new ids; the keys and values of earlier ids are in a `SlotCache`.

    A row whose ids begin as another's do takes the keys and values from it: of a group's samples that have
    written the same query the passages are computed once, of few-shot prompts the examples.
    Where every row has one new id, the rows are first moved to the first slots, long ones before short ones,
    so that attention reads the cache in place and no row reads much more than its own length. With `grouped`
    the attention is that of `srl.rollout.attention`, else the model's own.
    """

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int, *, grouped: bool = True) -> None:
        self.model = model
        self.cache = SlotCache(slots, max_length)
        self.assigned = SlotAssignment(self.cache)
        self._attention = grouped_attention if grouped else nullcontext
        self._splits = grouped and _takes_any_keyword(model)
        self._last_only = kept_logits(model, 1)
        self._head = head() if (head := getattr(model, "get_output_embeddings", None)) else None

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        """Logits (B, V) after the last known id of each row; the rows differ, and are not more than slots."""
        self.assigned.assign(table, rows)
        fed = table.fed[rows]
        with self._attention(self.model):
            if fed.all() and (table.known[rows] - fed == 1).all():
                return self._decode(table, rows)
            return self._prefill(table, rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.cache.nbytes

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()
        self.assigned = SlotAssignment(self.cache)

    def _decode(self, table: SlotTable, rows: Rows) -> Tensor:
        """One id a row, for rows in the first slots."""
        slots, buckets = arrange(
            self.assigned.slots(rows), table.known[rows], LENGTHS if self._splits else ()
        )
        self.assigned.move(table, rows, slots)
        by_slot = rows[np.argsort(slots)]
        positions = table.fed[by_slot][:, None]
        ids = table.ids[by_slot[:, None], positions]
        pick = None if (by_slot == rows).all() else (slots, np.zeros_like(slots))
        return self._run(np.arange(len(rows)), ids, positions, np.ones_like(ids), pick, buckets)

    def _prefill(self, table: SlotTable, rows: Rows) -> Tensor:
        """Any number of new ids a row. What several rows begin with is computed once, and copied."""
        leaders, leader_of = _same_ids(table, rows)
        self._reuse(table, rows[leaders])
        counts, fresh = (table.known - table.fed)[rows[leaders]], table.fed[rows[leaders]] == 0
        logits, order = [], []
        for part, run in ((np.flatnonzero(fresh), self._begin), (np.flatnonzero(~fresh), self._extend)):
            for group in padded_groups(counts[part], PADDED_TOKENS) if len(part) else ():
                logits.append(run(table, rows[leaders[part[group]]]))
                order.append(part[group])
        self._share(table, rows, leaders, leader_of)
        place = np.empty(len(leaders), dtype=np.int64)  # leader -> its row of `logits`
        place[np.concatenate(order)] = np.arange(len(leaders))
        return torch.cat(logits)[torch.from_numpy(place[leader_of])]

    def _reuse(self, table: SlotTable, rows: Rows) -> None:
        """Copy the keys and values of ids with which the episode of another row begins, too."""
        fresh = rows[table.fed[rows] == 0]
        common = common_lengths(table, fresh[0], fresh[1:], table.known) if len(fresh) > 1 else np.zeros(0)
        if len(common) and (least := int(common.min())) >= REUSED and least * len(common) >= LED:
            self._lead(table, fresh[:1], least)
        givers = np.array([row for row in self.assigned.slot_of if table.fed[row]], dtype=np.int64)
        if not len(givers):
            return
        fed, found = table.fed.copy(), []
        for row in rows.tolist():
            lengths = common_lengths(table, row, givers, fed)
            best = int(lengths.argmax())
            if lengths[best] - fed[row] >= REUSED:
                found.append((int(givers[best]), row, int(lengths[best])))
        if found:
            sources, targets, lengths = (np.array(column) for column in zip(*found, strict=True))
            slots = self.assigned.slots(sources), self.assigned.slots(targets)
            self.cache.copy(slots[0].tolist(), slots[1].tolist(), int(lengths.max()))
            table.fed[targets] = lengths

    def _lead(self, table: SlotTable, row: Rows, length: int) -> None:
        """Feed the first `length` ids of a new row."""
        positions = np.arange(length)[None]
        ids, pick = table.ids[row[:, None], positions], (np.zeros(1, np.int64), positions[0, -1:])
        self._run(self.assigned.slots(row), ids, positions, np.ones_like(ids), pick)
        table.fed[row] = length

    def _begin(self, table: SlotTable, rows: Rows) -> Tensor:
        """Rows of which nothing has been fed, padded on the right, where a causal model never looks."""
        counts = table.known[rows]
        positions = np.arange(counts.max()).repeat(len(rows)).reshape(-1, len(rows)).T  # (B, Q)
        kept = positions < counts[:, None]
        pick = (np.arange(len(rows)), counts - 1)
        return self._run(
            self.assigned.slots(rows), table.ids[rows[:, None], positions], positions, kept, pick
        )

    def _extend(self, table: SlotTable, rows: Rows) -> Tensor:
        """Rows with a past, padded on the left, so that the last column holds each row's last id."""
        counts = table.known[rows] - table.fed[rows]
        offsets = np.arange(-counts.max(), 0)[None]  # (1, Q)
        positions = np.maximum(table.known[rows][:, None] + offsets, 0)  # (B, Q)
        kept = offsets >= -counts[:, None]
        return self._run(self.assigned.slots(rows), table.ids[rows[:, None], positions], positions, kept)

    def _run(
        self,
        slots: Rows,
        ids: Rows,
        positions: Rows,
        kept: NDArray[Any],
        pick: tuple[Rows, Rows] | None = None,
        buckets: Sequence[Bucket] = (),
    ) -> Tensor:
        """The logits (B, V) of one forward over `ids` (B, Q).

        Ids that are not `kept` are not stored in the cache. `pick` has the row and the column of the ids
        whose logits are wanted, by default the last of each row. A decoding step has `buckets`, and its
        `slots` are the first ones.
        """
        access, longest = self.cache.access, int(positions.max()) + 1
        past = longest - ids.shape[1]
        self.cache.reserve(longest)
        places = np.where(kept, slots[:, None], access.slots)
        sent = _to_device([ids, places, positions, slots, *(pick or ())], self.model.device)
        width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, access.capacity)
        access.set(sent[1], sent[2], None if buckets else sent[3], width, past)
        keywords: dict[str, Any] = {"position_ids": sent[2], "past_key_values": self.cache, "use_cache": True}
        keywords["attention_mask"] = causal_mask(sent[2], width, self.model.dtype) if past else None
        if len(buckets) > 1:
            keywords["buckets"] = [(first, last, min(length, width)) for first, last, length in buckets]
        if pick is None:
            out = attempt(self.model, lambda: self.model(input_ids=sent[0], **keywords, **self._last_only))
            return out.logits[:, -1].float()
        with _picked(self._head, sent[4], sent[5]):
            logits = attempt(self.model, lambda: self.model(input_ids=sent[0], **keywords)).logits
        return (logits[sent[4], sent[5]] if self._head is None else logits[:, 0]).float()

    def _share(self, table: SlotTable, rows: Rows, leaders: Rows, leader_of: Rows) -> None:
        """Copy a leader's keys and values to the rows with the same prompt."""
        followers = np.setdiff1d(np.arange(len(rows)), leaders)
        if len(followers):
            source = rows[leaders[leader_of[followers]]]
            length = int(table.known[source].max())
            self.cache.copy(
                self.assigned.slots(source).tolist(),
                self.assigned.slots(rows[followers]).tolist(),
                length,
            )


def arrange(slots: Rows, lengths: Rows, limits: Sequence[int]) -> tuple[Rows, list[Bucket]]:
    """New slots (N,) for the rows that now have `slots` (N,), and the buckets in which they attend.

    The rows take the slots 0 … N - 1. Those above one of the `limits` in length come before those below it,
    and each bucket is as wide as its longest row. A row that is in its bucket already stays where it is.
    """
    count = len(slots)
    kind = np.searchsorted(np.array(limits, dtype=np.int64), lengths)  # (N,), 0 are the shortest
    kind_at = -np.sort(-kind)  # (N,) the kind of row that each slot is for
    stays = (slots < count) & (kind_at[np.minimum(slots, count - 1)] == kind)
    new = np.where(stays, slots, -1)
    movers = np.flatnonzero(~stays)
    new[movers[np.argsort(-kind[movers], kind="stable")]] = np.setdiff1d(np.arange(count), slots[stays])
    starts = [0, *(np.flatnonzero(np.diff(kind_at)) + 1).tolist(), count]
    by_slot = lengths[np.argsort(new)]
    widths = [-(-int(by_slot[a:b].max()) // WIDTH_STEP) * WIDTH_STEP for a, b in pairwise(starts)]
    return new, [(a, b, width) for (a, b), width in zip(pairwise(starts), widths, strict=True)]


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


class PlainForward:
    """Recomputes every sequence for each token: slow, and correct for any causal model.

    Padding is on the right, where a causal model never looks, so no mask is needed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        """Logits (B, V) after the last known id of each row."""
        lengths = table.known[rows]
        groups = list(padded_groups(lengths, PADDED_TOKENS))
        logits = torch.cat([self._run(table, rows[group]) for group in groups])
        return logits[torch.from_numpy(np.argsort(np.concatenate(groups)))]

    @property
    def nbytes(self) -> int:
        return 0

    def release(self) -> None:
        """Nothing is held between calls."""

    def _run(self, table: SlotTable, rows: Rows) -> Tensor:
        lengths = table.known[rows]
        positions = np.minimum(
            np.arange(lengths.max())[None], lengths[:, None] - 1
        )  # pads repeat the last id
        ids = torch.from_numpy(table.ids[rows[:, None], positions]).to(self.model.device)
        spread = int(lengths.max() - lengths.min())
        kept = kept_logits(self.model, spread + 1)
        output = attempt(self.model, lambda: self.model(input_ids=ids, use_cache=False, **kept))
        last = torch.from_numpy(lengths - lengths.max() - 1).to(ids.device)  # (B,), counted from the end
        return output.logits[torch.arange(len(rows), device=ids.device), last].float()


def causal_mask(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, Q, width): a query at position p sees the places 0 … p of its slot."""
    hidden = torch.arange(width, device=positions.device) > positions[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def padded_groups(counts: Rows, budget: int) -> Iterator[Rows]:
    """Indices into `counts`, longest first, in groups of at most `budget` padded tokens.

    No member of a group is shorter than three quarters of the longest, so little of a group is padding.
    """
    order = np.argsort(-counts, kind="stable")
    first = 0
    for place, index in enumerate(order):
        longest = counts[order[first]]
        if place > first and (longest * (place + 1 - first) > budget or 4 * counts[index] < 3 * longest):
            yield order[first:place]
            first = place
    yield order[first:]


def common_lengths(table: SlotTable, row: int, others: Rows, limits: Rows) -> Rows:
    """(N,) With how many ids of `row`, its last left out, each of the `others` (N,) begins.

    Of the others only the first `limits` (slots,) ids count.
    """
    last = int(table.known[row]) - 1
    differ = table.ids[others, :last] != table.ids[row, :last]  # (N, last)
    common = np.where(differ.any(axis=1), differ.argmax(axis=1), last) if last else np.zeros_like(others)
    found: Rows = np.minimum(common, limits[others])
    return found


def _same_ids(table: SlotTable, rows: Rows) -> tuple[Rows, Rows]:
    """The rows to compute, as indices into `rows`, and for each row the index of its leader among them.

    Rows with the same ids share a leader: a group's samples at their start, and while they write the same.
    """
    seen: dict[bytes, int] = {}
    leaders: list[int] = []
    leader_of = np.empty(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        key = table.ids[row, : table.known[row]].tobytes()
        if key not in seen:
            seen[key] = len(leaders)
            leaders.append(index)
        leader_of[index] = seen[key]
    return np.array(leaders), leader_of


def _takes_any_keyword(model: PreTrainedModel) -> bool:
    base: Any = getattr(model, "get_base_model", lambda: model)()
    parameters = inspect.signature(base.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
