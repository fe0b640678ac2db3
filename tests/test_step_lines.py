"""What the terminal says beside a step: the time left for the run, and that it teaches nothing."""

import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from srl.config import load_config
from srl.train import report
from srl.train.report import Terminal, nothing_to_learn

LEARNING = {
    "timing_s/step": 2.0, "env/number_of_valid_search": 0.5, "critic/advantages/max": 1.0,
    "critic/advantages/min": -1.0,
}  # fmt: skip
NO_SEARCH = LEARNING | {"env/number_of_valid_search": 0.0}
EQUAL = LEARNING | {"critic/advantages/max": 0.0, "critic/advantages/min": 0.0}


def config(*sets: str) -> Any:
    return load_config("tiny", sets=list(sets)).config


@pytest.mark.parametrize(
    ("values", "sets", "expected"),
    [
        (LEARNING, (), False), (NO_SEARCH, (), True), (NO_SEARCH, ("rollout.search=false",), False),
        (EQUAL, (), True), (EQUAL, ("rollout.search=false",), True), ({"timing_s/step": 1.0}, (), False),
    ],
)  # fmt: skip
def test_step_without_searches_or_advantages_teaches_nothing(values, sets, expected):
    assert bool(nothing_to_learn(values, config(*sets))) is expected


def test_time_left_is_that_of_all_steps_with_what_is_between_them(monkeypatch):
    """Steps of 2 s with 8 s of validation after the first: 28 of 30 steps at (2 + 8 + 2) / 2 s are left. A
    validation and a test come once more."""
    now, out = iter([102.0, 112.0, 114.0]), StringIO()
    monkeypatch.setattr(report.time, "monotonic", lambda: next(now))
    terminal = Terminal(Console(file=out, width=200))
    for step in (1, 2):
        terminal.step(step, config("trainer.total_training_steps=30"), LEARNING)
    for name, seconds in {"val": 9.0, "test": 30.0}.items():
        figures = {f"{name}/em": 0.5, f"{name}/f1": 0.5, "timing_s/testing": seconds}
        terminal.evaluation(name, 0, figures)
    terminal.step(3, config("trainer.total_training_steps=30"), LEARNING)
    left = re.findall(r"(\S+(?: \S+)?) left", out.getvalue().replace("  ", "\n"))
    assert left == ["58s", "2m 48s", "2m 45s"]
