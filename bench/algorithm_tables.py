"""The tables of docs/algorithms.md: every algorithm on the made-up world, and how a second hop is found."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from bench.markdown_table import table

RESULTS = Path(__file__).parent / "results"
REACHED = 0.8
"""The exact match whose cost in tokens is reported."""
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95% interval, by the number of runs."""

Run = Mapping[str, Any]


def by_row(name: str) -> dict[str, list[Run]]:
    """The runs of a result by row, in the order of their seeds. A key is `row/seed`."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["runs"]
    rows: dict[str, list[Run]] = {}
    for key in sorted(found, key=lambda key: int(key.partition("/")[2])):
        rows.setdefault(key.partition("/")[0], []).append(found[key])
    return rows


def algorithms() -> str:
    """Each algorithm up to the tokens that all runs reached: exact match, tokens to `REACHED`, worst dip."""
    rows = by_row("algorithms")
    budget = min(run["val"][-1]["tokens"] for runs in rows.values() for run in runs)
    lines = []
    for name, runs in rows.items():
        curves = [[point for point in run["val"] if point["tokens"] <= budget] for run in runs]
        lines.append([
            f"`{name}`", str(len(runs)), _with_seeds([em_at(run["val"], budget) for run in runs]),
            _tokens([tokens_to(curve) for curve in curves]), _share(max(map(worst_dip, curves))),
        ])  # fmt: skip
    at = f"EM after {_thousands(budget)} tokens (each seed)"
    return table(["algorithm", "seeds", at, f"tokens to {_share(REACHED)}", "worst dip"], lines)


def em_at(val: Sequence[Mapping[str, float]], tokens: float) -> float:
    """The exact match at so many tokens, on the straight line between two validations."""
    for before, after in pairwise(val):
        if tokens <= after["tokens"]:
            part = (tokens - before["tokens"]) / (after["tokens"] - before["tokens"])
            return before["em"] + part * (after["em"] - before["em"])
    raise ValueError(f"no validation at {tokens} tokens")


def tokens_to(val: Sequence[Mapping[str, float]]) -> float | None:
    """The tokens before the first validation with an exact match of `REACHED`."""
    return next((point["tokens"] for point in val if point["em"] >= REACHED), None)


def worst_dip(val: Sequence[Mapping[str, float]]) -> float:
    """How far a validation was below the best one before it, at most."""
    best, dip = 0.0, 0.0
    for point in val:
        best = max(best, point["em"])
        dip = max(dip, best - point["em"])
    return dip


def _tokens(found: Sequence[float | None]) -> str:
    reached = [tokens for tokens in found if tokens is not None]
    if not reached:
        return "not reached"
    count = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)} seeds)"
    return f"{_thousands(mean(reached))}{count}"


def _thousands(tokens: float) -> str:
    return f"{round(tokens, -3):,.0f}"


ROWS = {
    "recipe": "the preset",
    "credit": "one advantage for an episode (`rloo`)",
    "evidence": "no reward for evidence",
    "mix": "no shares: questions as they come",
    "kl": "no KL",
}


def second_hop() -> str:
    """The preset `tiny-hard`, and each of its settings left out: exact match on the test questions."""
    rows = by_row("second_hop")
    lines = []
    for name in (name for name in ROWS if name in rows):
        ends = [run["end"] for run in rows[name]]
        two, one = ([end[key] for end in ends] for key in ("em_2_hops", "em_1_hop"))
        lines.append([
            ROWS[name], str(len(ends)), _with_seeds(two), interval(two), _share(mean(one)),
            _share(mean(end["em"] for end in ends)), f"{mean(end['searches'] for end in ends):.2f}",
        ])  # fmt: skip
    headers = ["", "seeds", "two hops (each seed)", "95% interval", "one hop", "all", "searches"]
    return table(headers, lines)


def interval(values: Sequence[float]) -> str:
    """Student's interval of the mean over seeds, within 0 and 1."""
    if len(values) < 2:
        return ""
    half = STUDENT[len(values)] * stdev(values) / sqrt(len(values))
    return f"{_share(max(0.0, mean(values) - half))} to {_share(min(1.0, mean(values) + half))}"


def _with_seeds(values: Sequence[float]) -> str:
    return f"{_share(mean(values))} ({', '.join(map(_share, values))})"


def _share(value: float) -> str:
    return f"{value:.3f}".lstrip("0") if value < 1 else f"{value:.3f}"


TABLES: dict[str, Callable[[], str]] = {"algorithms": algorithms, "second_hop": second_hop}
