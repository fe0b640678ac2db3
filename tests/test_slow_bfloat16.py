"""The note that bfloat16 is slow on this CPU: when it comes, and what is measured."""

from __future__ import annotations

import pytest
import torch
from tests.tiny_models import tiny_model

from srl.train.slow_bfloat16 import bfloat16_factor, note_slow_bfloat16


class Cpu:
    """A processor whose products take so many seconds; its clock is moved by nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float) -> None:
        self.now, self.widths = 0.0, set[int]()
        seconds = {torch.float32: float32, torch.bfloat16: bfloat16}

        def linear(left: torch.Tensor, right: torch.Tensor) -> None:
            self.now += seconds[left.dtype]
            self.widths.add(right.shape[0])

        monkeypatch.setattr(torch.nn.functional, "linear", linear)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("bfloat16", "dtype", "said"),
    [
        (2.0, torch.bfloat16, ["2.0"]),
        (1.3, torch.bfloat16, ["1.3"]),
        (1.1, torch.bfloat16, []),
        (0.3, torch.bfloat16, []),
        (2.0, torch.float32, []),
    ],
)
def test_bfloat16_is_told_of_where_it_is_slower(monkeypatch, bfloat16, dtype, said):
    model, notes = tiny_model().to(dtype), list[str]()
    cpu = Cpu(monkeypatch, 1.0, bfloat16)
    note_slow_bfloat16(model, notes.append, cpu.clock)
    assert notes == [
        f"model.dtype=bfloat16 is slow on this CPU: matrix products take {factor} times as long as in "
        "float32; --set model.dtype=float32 is faster, with twice the memory for weights"
        for factor in said
    ]
    assert cpu.widths <= {model.config.hidden_size}


def test_a_clock_that_stands_still_says_nothing(monkeypatch):
    assert bfloat16_factor(8, Cpu(monkeypatch, 0.0, 0.0).clock) == 1.0


def test_products_of_this_machine_are_timed():
    assert bfloat16_factor(64) > 0
