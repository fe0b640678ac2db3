"""The README's tables about runs on verl, from `bench/results/verl_*.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.markdown_table import table

RESULTS = Path(__file__).parent / "results"


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def learning() -> str:
    """Greedy exact match over the steps, each algorithm on both backends."""
    found = load("verl_learning")
    rows = found["rows"]
    steps = sorted({int(step) for row in rows.values() for step in row["val"]})
    head = [
        f"greedy EM, {found['questions']} validation questions",
        *(f"step {step}" for step in steps),
        "test",
    ]
    lines = [
        [name, *(share(row["val"].get(str(step))) for step in steps), share(row["end"]["em"])]
        for name, row in rows.items()
    ]
    return table(head, lines)


def overhead() -> str:
    """Our seconds of a step, and their share at each assumed speed."""
    found = load("verl_overhead")
    rows = found["shares"].items()
    head = ["generation, assumed", "a step on eight GPUs", "ours, measured", "share"]
    return table(
        head,
        [
            [name, f"{row['step_s']:.0f} s", f"{row['ours_s']:.1f} s", f"{100 * row['share']:.1f}%"]
            for name, row in rows
        ],
    )


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}".removeprefix("0") if value < 1 else "1.000"


TABLES = {"verl_learning": learning, "verl_overhead": overhead}
