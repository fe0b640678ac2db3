"""The tables of docs/inspect.md on a large log, from bench/results/log_*.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.markdown_table import table

RESULTS = Path(__file__).parent / "results"


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def log_commands() -> str:
    """Wall clock, processor time and memory of each command, in both states."""
    states = _load("log_commands")
    rows = []
    for name in states["finished"]["commands"]:
        cells = [_cells(states[state]["commands"][name]) for state in ("running", "finished")]
        rows.append([name, *cells[0], *cells[1]])
    headers = ["command", "in parts", "processor", "memory", "finished", "processor", "memory"]
    return table(headers, rows)


def _cells(figures: dict[str, float]) -> list[str]:
    return [f"{figures['wall_s']:.2f} s", f"{figures['cpu_s']:.2f} s", f"{figures['memory_gb']:.2f} GB"]


def log_page() -> str:
    """The first view of each page, and later ones, in both states."""
    states = _load("log_page")
    rows = []
    for name in states["finished"]["seconds"]:
        found = [states[state]["seconds"][name] for state in ("running", "finished")]
        rows.append([name, *(f"{one[view]:.2f} s" for one in found for view in ("first", "again"))])
    return table(["page", "in parts", "again", "finished", "again"], rows)


def log_sizes() -> str:
    """The disk of the log in both states, beside other formats."""
    states = _load("log_commands")
    sizes = {
        "the log in parts": states["running"]["disk_gb"], "the finished log": states["finished"]["disk_gb"],
        "SQLite": states["finished"]["sqlite_gb"], "JSON lines": states["finished"]["jsonl_gb"],
    }  # fmt: skip
    largest = sizes["JSON lines"]
    rows = [[name, f"{size:.1f} GB", f"{size / largest:.0%}"] for name, size in sizes.items()]
    return table([f"{states['finished']['trajectories']:,} trajectories", "disk", "of JSON lines"], rows)


def log_writing() -> str:
    """What a step's log costs training."""
    by_size = _load("log_writing")["episodes"]
    rows = [
        [episodes, f"{found['tokens']:,}", f"{found['hand_over_ms']['median']:.1f} ms",
         f"{found['hand_over_ms']['longest']:.0f} ms", f"{found['pause_ms']['median']:.0f} ms",
         f"{found['processor_s']:.2f} s", f"{found['write_s']['longest']:.1f} s",
         *(f"{share:.2%}" for share in found["shares"].values())]
        for episodes, found in by_size.items()
    ]  # fmt: skip
    speeds = next(iter(by_size.values()))["shares"]
    headers = ["episodes", "tokens", "handing over", "longest", "pause", "processor", "longest write",
               *(f"of a step at {speed}" for speed in speeds)]  # fmt: skip
    return table(headers, rows)


def log_kills() -> str:
    """What the killed processes were doing, and the logs that broke."""
    killed = _load("log_readers")["kills"]
    names = {"write": "writing steps", "finish": "finishing", "resume": "resuming a finished log",
             "prune": "pruning", "merge": "merging"}  # fmt: skip
    rows = [[words, str(killed["during"][name])] for name, words in names.items()]
    rows.append(["all", f"{killed['kills']}; {len(killed['failures'])} broke the log"])
    return table(["killed while", "kills"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "log_commands": log_commands,
    "log_page": log_page,
    "log_sizes": log_sizes,
    "log_writing": log_writing,
    "log_kills": log_kills,
}
