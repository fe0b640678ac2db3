"""Draw docs/real_learning.svg: a real model while it learns. `python docs/draw_real_learning.py [--check]`

The curves are those of bench/results/real_learning.json. A test fails when the file is not what this draws.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from drawing import main, page, text

FILE = Path(__file__).parent / "real_learning.svg"
RESULT = Path(__file__).parent.parent / "bench" / "results" / "real_learning.json"
LABEL = "A real model learns to search: response length, searches, valid actions, reward and EM by step."
PANELS = {
    "response_length/mean": "tokens written an episode",
    "env/number_of_valid_search": "searches a question",
    "env/ratio_of_valid_action": "valid actions",
    "critic/score/mean": "reward",
    "train/em": "EM, sampled",
    "val/em": "EM, validation, greedy",
}
RUNS = {
    "grpo": ("GRPO", "#4c8a4c"),
    "ppo": ("PPO", "#b97a1f"),
    "grpo-no-mask": ("GRPO, no mask", "#5470b8"),
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 150, 50, 60, 70
MOST = 60
"""Points of a line; more are averaged."""


class Line(NamedTuple):
    """The values of a run over its steps."""

    colour: str
    steps: Sequence[float]
    values: Sequence[float]


def lines_of(curves: dict[str, Any], metric: str) -> Iterator[Line]:
    for run, (_, colour) in RUNS.items():
        for found in curves.get(run, {}).values():
            if metric in found:
                steps, values = found[metric]["steps"], found[metric]["values"]
                size = -(-len(steps) // MOST)
                yield Line(colour, averaged(steps, size), averaged(values, size))


def averaged(values: Sequence[float], size: int) -> list[float]:
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    return [sum(part) / len(part) for part in parts]


def panel(x: float, y: float, title: str, lines: Sequence[Line]) -> list[str]:
    """Axes with their ends, and the lines; from zero up."""
    drawn = [f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" class="panel"/>']
    drawn.append(text(x, y - 10, title, "title"))
    last = max((max(line.steps) for line in lines), default=1) or 1
    high = max((max(line.values) for line in lines), default=1) or 1
    drawn += [text(x - 6, y + 12, f"{high:.3g}", anchor="end"), text(x - 6, y + HEIGHT, "0", anchor="end"),
              text(x + WIDTH, y + HEIGHT + 16, f"step {last:g}", anchor="end")]  # fmt: skip
    for line in lines:
        points = " ".join(
            f"{x + WIDTH * step / last:.1f},{y + HEIGHT - HEIGHT * max(value, 0) / high:.1f}"
            for step, value in zip(line.steps, line.values, strict=True)
        )
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{line.colour}" stroke-width="1.8"/>')
    return drawn


def drawing(curves: dict[str, Any]) -> str:
    """All panels, two in a row, and which colour is which run."""
    parts: list[str] = []
    for number, (metric, title) in enumerate(PANELS.items()):
        x, y = LEFT + number % 2 * (WIDTH + GAP), TOP + number // 2 * (HEIGHT + GAP)
        parts += panel(x, y, title, list(lines_of(curves, metric)))
    for number, run in enumerate(run for run in RUNS if run in curves):
        name, colour = RUNS[run]
        seeds = f"{len(curves[run])} seed{'s' if len(curves[run]) > 1 else ''}"
        parts.append(f'<rect x="{LEFT + 210 * number}" y="14" width="14" height="4" fill="{colour}"/>')
        parts.append(text(LEFT + 210 * number + 20, 21, f"{name}, {seeds}"))
    if not curves:
        parts.append(text(LEFT, 21, "No run has been measured yet."))
    return page(LABEL, 2 * (LEFT + WIDTH) + GAP, TOP + 3 * (HEIGHT + GAP), parts)


def known_curves() -> dict[str, Any]:
    if not RESULT.is_file():
        return {}
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))["curves"]
    return {run: found[run] for run in RUNS if run in found}


if __name__ == "__main__":
    sys.exit(main(FILE, drawing(known_curves())))
