"""How trl's settings for `step.py` were chosen: one step each after a warm-up, on the real shape."""

from __future__ import annotations

from typing import Any

from bench.speed import step
from bench.speed.harness import Entry, Options, interleaved, medians

CONTENDERS = step.CONTENDERS
TRIED: dict[str, dict[str, Any]] = {
    "micro-batches of 4": {},
    "micro-batches of 2": {"micro": 2},
    "micro-batches of 8": {"micro": 8},
    "torch_compile": {"compile": True},
}


def run(options: Options) -> dict[str, Any]:
    """The figures of each setting; none where no step ended within the harness' limit."""
    entries = [Entry(name, "trl", 2, {"shape": "real", **more}) for name, more in TRIED.items()]
    found = {}
    for entry in entries:
        runs, _ = interleaved("trl_settings", [entry], options, options.rounds)
        found[entry.name] = medians(runs[entry.name]) if entry.name in runs else {}
    return found
