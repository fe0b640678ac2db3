"""Write the tables of README.md from `bench/results/*.json`, between their markers.

    python bench/readme.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. With `--check` nothing is written and
the exit code says whether the page is what the results say.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] + ["--:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def learning() -> str:
    """Where it starts, and what each kind of run makes of it."""
    rows = load("learning")["rows"]
    lines = [_start(name, rows[name]) for name in rows if isinstance(rows[name], dict)]
    lines += [_run(name, rows[name]) for name in rows if isinstance(rows[name], list)]
    headers = ["1,024 test questions", "EM greedy", "one hop", "two hops", "searches", "EM sampled", "pass@8",
               "seconds"]  # fmt: skip
    return table(headers, lines)


def _start(name: str, row: dict[str, float]) -> list[str]:
    figures = [row[key] for key in ("em", "em_1_hop", "em_2_hops")]
    return [name, *map(_share, figures), f"{row['searches']:.2f}", _share(row["em_sampled"]),
            _share(row["pass_at_8"]), ""]  # fmt: skip


def _run(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """The end of the runs: the mean, and the range over the seeds."""
    ends = [run["end"] for run in runs]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    cells = [_range([end[key] for end in ends]) for key in ("em", "em_1_hop", "em_2_hops")]
    searches = f"{mean(end['searches'] for end in ends):.2f}"
    seconds = f"{mean(run['train_seconds'] for run in runs):.0f}"
    some = "seed" if len(runs) == 1 else "seeds"
    return [f"**{name}**, {runs[0]['steps']} steps, {some} {seeds}", *cells, searches, "", "", seconds]


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    spread = f" ({_share(low)} to {_share(high)})" if _share(low) != _share(high) else ""
    return f"{_share(mean(values))}{spread}"


def _share(value: float) -> str:
    return f"{value:.3f}".lstrip("0") if value < 1 else f"{value:.3f}"


def recall() -> str:
    """BM25's recall of a question's own paragraph."""
    rows = load("retrieval_quality")["rows"]
    names = [f"recall@{k}" for k in (1, 3, 5, 10)]
    return table(
        ["stop words, stemmer", *names],
        [[f"{row['stopwords']}, {row['stemmer']}", *(_share(row[name]) for name in names)] for row in rows],
    )


def startup() -> str:
    """How long the command takes to start."""
    lines = []
    for name, row in load("startup")["commands"].items():
        lines.append([f"`{name}`", f"{1000 * row['wall_s']:.0f} ms", f"{row['wall_ratio']:.1f}×"])
    return table(["command", "median", "against an empty interpreter"], lines)


TABLES: dict[str, Callable[[], str]] = {"learning": learning, "recall": recall, "startup": startup}


def rendered(page: str) -> str:
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def main() -> int:
    path = ROOT / "README.md"
    page = path.read_text(encoding="utf-8")
    if "--check" in sys.argv[1:]:
        return int(rendered(page) != page)
    path.write_text(rendered(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
