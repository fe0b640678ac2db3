"""The tables of docs/stability.md: collapses made on purpose, and healthy runs beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.markdown_table import table

RESULT = Path(__file__).parent / "results" / "collapse.json"
FELL = 0.1
"""Validation has fallen when its exact match is this much below its best."""

Run = Mapping[str, Any]


def load() -> dict[str, Any]:
    return json.loads(RESULT.read_text(encoding="utf-8"))["runs"]


def collapse() -> str:
    """Each collapse: which watch fired first, when validation fell, and how the runs ended."""
    runs = load()
    lines = []
    for key, noted in runs.items():
        kind, _, seed, action = key.split("/")
        back = runs.get(key.removesuffix("note") + "rollback")
        if kind == "healthy" or action != "note" or back is None:
            continue
        lines.append([
            kind, seed, str(noted["begins"]), first_watches(noted), fell(noted), _share(best_before(noted)),
            at_the_end(noted), rolled_back(back), at_the_end(back),
        ])  # fmt: skip
    return table([
        "collapse", "seed", "fault from step", "first watch, its step", "validation fell at", "EM before",
        "EM at the end", "roll-backs to step", "EM at the end with them",
    ], lines)  # fmt: skip


def healthy() -> str:
    """Each healthy run, and the watches that fired in it."""
    lines = []
    for key, run in load().items():
        kind, algo, seed, _ = key.split("/")
        if kind == "healthy":
            fired = ", ".join(f"{one['watch']} {one['step']}" for one in run["fired"])
            lines.append([algo, seed, _share(run["val"]["0"]), at_the_end(run), fired or "none"])
    return table(["healthy run", "seed", "EM before", "EM at the end", "watches"], lines)


def best_before(run: Run) -> float:
    """The best validation before the fault."""
    return max(em for step, em in run["val"].items() if int(step) < run["begins"])


def fell(run: Run) -> str:
    """The first validation since the fault began that is `FELL` below the best one before it."""
    val = {int(step): em for step, em in run["val"].items()}
    steps = [step for step in val if step >= run["begins"]]
    found = next((at for at in steps if val[at] < max(val[step] for step in val if step < at) - FELL), None)
    return "never" if found is None else str(found)


def first_watches(run: Run) -> str:
    """The watches that fired first, with their step."""
    if not run["fired"]:
        return "none"
    step = min(one["step"] for one in run["fired"])
    names = dict.fromkeys(one["watch"] for one in run["fired"] if one["step"] == step)
    return f"{', '.join(names)}: {step}"


def rolled_back(run: Run) -> str:
    """The steps that a run went back to, in order."""
    steps = [str(one["to_step"]) for one in run["fired"] if one["to_step"] is not None]
    return ", ".join(steps) or "none"


def at_the_end(run: Run) -> str:
    """The last validation, and that the run stopped after it where it did."""
    stopped = "" if run["exit"] == 0 else f", stopped at {max(map(int, run['val']))}"
    return _share(run["last"]) + stopped


def _share(value: float) -> str:
    return f"{value:.3f}".removeprefix("0")


TABLES: dict[str, Callable[[], str]] = {"collapse": collapse, "collapse_healthy": healthy}
