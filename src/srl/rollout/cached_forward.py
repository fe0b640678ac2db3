"""The model's forward pass over the slots of a table, with a key-value cache or without one.

Both kinds give the logits after the last known id of each row, `feed(table, rows) -> (B, V)`.
`choose_forward` takes the cached one only where a small probe shows that its logits are right.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from srl.rollout.engine import Sampling
from srl.rollout.kv_cache import SlotCache
from srl.rollout.slot_table import Rows, SlotTable

PADDED_TOKENS = 4096
"""The most tokens in one forward pass, padding included, where rows have several new tokens."""
WIDTH_STEP = 16
"""Attention widths are rounded up to a multiple of this: kernels want alignment and few shapes."""

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

    def release(self) -> None: ...


class CachedForward:
    """Feeds each row only its new ids; the keys and values of earlier ids are in a `SlotCache`."""

    def __init__(self, model: PreTrainedModel, slots: int, max_length: int) -> None:
        self.model = model
        self.cache = SlotCache(slots, max_length)
        self.options = {"use_cache": True, **_logits_of_the_last(model, 1)}

    def feed(self, table: SlotTable, rows: Rows) -> Tensor:
        """Logits (B, V) after the last known id of each row; the rows differ."""
        counts = table.known[rows] - table.fed[rows]
        if (counts == 1).all():
            return self._decode(table, rows)
        leaders, leader_of = _shared_prompts(table, rows)
        groups = list(padded_groups(counts[leaders], PADDED_TOKENS))
        logits = torch.cat([self._prefill(table, rows[leaders[group]]) for group in groups])
        self._share(table, rows, leaders, leader_of)
        place = np.empty(len(leaders), dtype=np.int64)  # leader -> its row of `logits`
        place[np.concatenate(groups)] = np.arange(len(leaders))
        return logits[torch.from_numpy(place[leader_of])]

    def release(self) -> None:
        """Free the cache's memory."""
        self.cache.release()

    def _decode(self, table: SlotTable, rows: Rows) -> Tensor:
        """One id a row. If most slots up to the last one are active, the idle ones are computed too: a view
        of the cache is cheaper than gathering rows."""
        first = int(rows.max()) + 1
        if 2 * len(rows) < first:
            return self._prefill(table, rows)
        positions = np.minimum(table.fed[:first], table.fed[rows].max())[:, None]
        ids = np.take_along_axis(table.ids[:first], positions, axis=1)
        kept = np.zeros((first, 1), dtype=np.bool_)
        kept[rows] = True
        logits = self._run(None, ids, positions, kept)
        return logits if len(rows) == first else logits[torch.from_numpy(rows)]

    def _prefill(self, table: SlotTable, rows: Rows) -> Tensor:
        """Any number of ids a row, padded on the left, so that the last column holds each row's last id."""
        counts = table.known[rows] - table.fed[rows]
        offsets = np.arange(-counts.max(), 0)[None]  # (1, Q)
        positions = np.maximum(table.known[rows][:, None] + offsets, 0)  # (B, Q)
        kept = offsets >= -counts[:, None]
        return self._run(rows, table.ids[rows[:, None], positions], positions, kept)

    def _run(self, rows: Rows | None, ids: Rows, positions: Rows, kept: NDArray[np.bool_]) -> Tensor:
        """One forward over `ids` (B, Q); ids that are not `kept` are not stored in the cache."""
        access, longest = self.cache.access, int(positions.max()) + 1
        self.cache.reserve(longest)
        slots = np.where(kept, (np.arange(len(ids)) if rows is None else rows)[:, None], access.slots)
        feed, slot, place = torch.from_numpy(np.stack([ids, slots, positions])).to(self.model.device)
        width = min(-(-longest // WIDTH_STEP) * WIDTH_STEP, access.capacity)
        chosen = None if rows is None else torch.from_numpy(rows).to(feed.device)
        access.set(slot, place, chosen, width, past=longest - ids.shape[1])
        mask = causal_mask(place, width, self.model.dtype)
        where = {"position_ids": place, "attention_mask": mask, "past_key_values": self.cache}
        return self.model(input_ids=feed, **where, **self.options).logits[:, -1].float()

    def _share(self, table: SlotTable, rows: Rows, leaders: Rows, leader_of: Rows) -> None:
        """Copy a leader's keys and values to the rows with the same prompt."""
        followers = np.setdiff1d(np.arange(len(rows)), leaders)
        if len(followers):
            source = rows[leaders[leader_of[followers]]]
            length = int(table.known[source].max())
            self.cache.copy(source.tolist(), rows[followers].tolist(), length)


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

    def release(self) -> None:
        """Nothing is held between calls."""

    def _run(self, table: SlotTable, rows: Rows) -> Tensor:
        lengths = table.known[rows]
        positions = np.minimum(
            np.arange(lengths.max())[None], lengths[:, None] - 1
        )  # pads repeat the last id
        ids = torch.from_numpy(table.ids[rows[:, None], positions]).to(self.model.device)
        spread = int(lengths.max() - lengths.min())
        output = self.model(input_ids=ids, use_cache=False, **_logits_of_the_last(self.model, spread + 1))
        last = torch.from_numpy(lengths - lengths.max() - 1).to(ids.device)  # (B,), counted from the end
        return output.logits[torch.arange(len(rows), device=ids.device), last].float()


def causal_mask(positions: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Additive mask (B, 1, Q, width): a query at position p sees the places 0 … p of its slot."""
    hidden = torch.arange(width, device=positions.device) > positions[..., None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]


def padded_groups(counts: Rows, budget: int) -> Iterator[Rows]:
    """Indices into `counts`, longest first, in groups of at most `budget` padded tokens.

    No member of a group is shorter than half the longest, so at most half of a group is padding.
    """
    order = np.argsort(-counts, kind="stable")
    first = 0
    for place, index in enumerate(order):
        longest = counts[order[first]]
        if place > first and (longest * (place + 1 - first) > budget or 2 * counts[index] < longest):
            yield order[first:place]
            first = place
    yield order[first:]


def _shared_prompts(table: SlotTable, rows: Rows) -> tuple[Rows, Rows]:
    """The rows to compute, as indices into `rows`, and for each row the index of its leader among them.

    Rows with the same ids and nothing fed, such as a group's samples at their start, share one leader.
    """
    seen: dict[object, int] = {}
    leaders: list[int] = []
    leader_of = np.empty(len(rows), dtype=np.int64)
    for index, row in enumerate(rows):
        key = table.ids[row, : table.known[row]].tobytes() if table.fed[row] == 0 else int(row)
        if key not in seen:
            seen[key] = len(leaders)
            leaders.append(index)
        leader_of[index] = seen[key]
    return np.array(leaders), leader_of


def _logits_of_the_last(model: PreTrainedModel, count: int) -> dict[str, Any]:
    """The keyword that limits the logits to the last `count` positions, where the model has one."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    known = "logits_to_keep" in inspect.signature(base.forward).parameters
    return {"logits_to_keep": count} if known else {}


def choose_forward(model: PreTrainedModel, slots: int, max_length: int) -> Forward:
    """A cached forward where its logits equal those of a full one, else the plain one and a warning."""
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
        "%s runs without a key-value cache, so every token recomputes its whole sequence: %s",
        type(model).__name__,
        reason,
    )
    return PlainForward(model)


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


def _mismatch(model: PreTrainedModel, max_length: int) -> str | None:
    """How the logits with and without the cache differ over the probe's steps; None where they agree."""
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
    """Root mean square difference in units of the logits' standard deviation."""
    ratio = (ours - theirs).square().mean().sqrt() / theirs.std().clamp_min(1e-12)
    return float(ratio.nan_to_num(nan=float("inf")))
