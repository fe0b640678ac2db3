"""Which forward pass the torch engine generates with: a cached one where a probe shows that it is right.

The probe feeds a few ids to the model with and without a key-value cache, and compares the logits with those
of each row alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from srl.errors import UserError, error_line
from srl.models.check import Probe, attempt, probe
from srl.rollout.cached_forward import CachedForward, Forward, PlainForward
from srl.rollout.engine import Sampling
from srl.rollout.slot_table import SlotTable

STEPS = (7, 6, 5, 0)
"""Ids still to come after each step: a prompt, two single ids, then a span."""

_log = logging.getLogger(__name__)


@torch.no_grad()
def choose_forward(
    model: PreTrainedModel, slots: int, max_length: int, *, graphs: bool | None = None
) -> Forward:
    """A cached forward whose logits equal those of each row alone; otherwise the plain one, and a warning.

    `graphs` are those of `CachedForward`. Raises UserError where the plain one is wrong too.
    """
    expected, name = probe(model, max_length), type(model).__name__
    plain = PlainForward(model)
    if why := attempt(model, lambda: _mismatch(plain, expected, steps=(3,))):
        raise UserError(f"{name}: rows in a batch do not get the logits of rows alone, they differ {why}")
    for in_place in (True, False):
        try:
            forward = CachedForward(
                model, len(expected.rows), len(expected.rows[0]), graphs=False, in_place=in_place
            )
            why = (apart := _mismatch(forward, expected)) and f"its logits differ {apart}"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a model's own code raises at a cache that it does not know
            why = f"it raises {type(error).__name__}: {error_line(error)}"
        if why is None:
            return CachedForward(model, slots, max_length, graphs=graphs, in_place=in_place)
    _log.warning(
        "%s runs without a key-value cache, so every token recomputes its whole sequence: with one %s; "
        "rollout.engine=vllm may have one that fits",
        name,
        why,
    )
    return plain


def _mismatch(forward: Forward, expected: Probe, steps: Sequence[int] = STEPS) -> str | None:
    """How the logits of `forward` differ at the ends of the rows; None where they agree.

    All rows are fed together, so far that as many ids as `steps` says are still to come: prompts, then single
    ids, then a span.
    """
    count, ends = len(expected.rows), expected.ends.shape[1]
    table, rows = SlotTable(count), np.arange(count)
    lengths = sorted({max(ends - later, 1) for later in steps})  # the ends that are reached
    logits = []
    for reached in lengths:
        for row, ids in enumerate(expected.rows):
            upto = ids[: len(ids) - ends + reached]
            table.begin(row, upto, Sampling(max_tokens=1), 0)
        logits.append(forward.feed(table, rows))
        table.fed[:] = table.known
    places = torch.tensor(lengths, device=expected.ends.device) - 1
    return expected.wrong(torch.stack(logits, dim=1), expected.ends[:, places])
