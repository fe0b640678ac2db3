"""Says so where a model in bfloat16 is slow, because this CPU multiplies float32 faster."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch

from srl.train.threads import Clock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SLOWER = 1.2
"""Products in bfloat16 that take this many times as long as in float32 are told of."""
_ROWS, _WIDEST, _TURNS = 512, 1024, 5
"""Rows of the products that are timed, their width at most, and how often: some 50 ms on two cores."""


def note_slow_bfloat16(
    model: PreTrainedModel, note: Callable[[str], None], clock: Clock = time.perf_counter
) -> None:
    """Tell `note` if `model` is in bfloat16 on a CPU on which its matrix products are slower than in float32.

    Without AMX, PyTorch's products of bfloat16 can be several times faster than those of float32, or take
    twice as long: it depends on the processor, so they are timed.
    """
    if model.device.type != "cpu" or model.dtype != torch.bfloat16:
        return
    width = min(getattr(model.config, "hidden_size", _WIDEST), _WIDEST)
    factor = bfloat16_factor(width, clock)
    if factor >= SLOWER:
        note(
            f"model.dtype=bfloat16 is slow on this CPU: matrix products take {factor:.1f} times as long as "
            "in float32; --set model.dtype=float32 is faster, with twice the memory for weights"
        )


def bfloat16_factor(width: int, clock: Clock = time.perf_counter) -> float:
    """How many times as long products of (512, width) by (width, width) take in bfloat16 as in float32.

    The two take turns, so that other load on the machine meets both.
    """
    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], torch.bfloat16: []}
    ones = {dtype: torch.ones(max(_ROWS, width), width, dtype=dtype) for dtype in seconds}
    with torch.inference_mode():
        for _ in range(_TURNS):
            for dtype, matrix in ones.items():
                start = clock()
                torch.nn.functional.linear(matrix[:_ROWS], matrix[:width])
                seconds[dtype].append(clock() - start)
    fast, slow = map(median, seconds.values())
    return slow / fast if fast > 0 else 1.0
