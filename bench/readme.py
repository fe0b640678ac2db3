"""Write the tables of README.md and of docs from `bench/results/*.json`, between their markers.

    python bench/readme.py [--check]

A table is between `<!-- table: NAME -->` and `<!-- end -->`. With `--check` nothing is written, and the exit
code is 1 if a page differs from the results.
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
sys.path[0] = str(ROOT)

from bench import (  # noqa: E402
    algorithm_tables,
    log_tables,
    real_tables,
    scale_tables,
    speed_tables,
    stability_tables,
    verl_tables,
)
from bench.markdown_table import table  # noqa: E402

RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def learning() -> str:
    """Where it starts, and what each kind of run makes of it."""
    rows = load("learning")["rows"]
    lines = [_start(name, rows[name]) for name in rows if isinstance(rows[name], dict)]
    lines += [_run(name, rows[name]) for name in rows if isinstance(rows[name], list)]
    headers = ["1,024 test questions", "EM greedy", "one hop", "two hops", "searches", "EM sampled", "pass@8",
               "EM before"]  # fmt: skip
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
    before = _range([run["start"]["em"] for run in runs])
    some = "seed" if len(runs) == 1 else "seeds"
    return [f"**{name}**, {runs[0]['steps']} steps, {some} {seeds}", *cells, searches, "", "", before]


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


def real_evaluation() -> str:
    """EM of every setting on each set, and on the mean over sets."""
    settings = load("real_evaluation")["settings"]
    names = [row["name"] for row in next(iter(settings.values()))][:-1]
    lines = []
    for setting, rows in settings.items():
        cells = [_estimate(row["measures"]["em"]) for row in rows if row["name"] in names]
        lines.append([setting, *cells])
    used = next(iter(settings.values()))
    sizes = [f"{row['name']}, {row['used']} of {row['size']:,}" for row in used if row["name"] in names]
    return table(["EM (95% interval)", *sizes], lines)


def real_evaluation_means() -> str:
    """Every measure of every setting, as the mean over sets, and the share that the corpus can answer."""
    lines = []
    for setting, rows in load("real_evaluation")["settings"].items():
        row = next(row for row in rows if row["name"] == "mean over sets")
        figures = [_estimate(row["measures"][name]) for name in ("em", "f1", "cover_em")]
        lines.append([setting, *figures, _share(row["answerable"])])
    return table(["mean over sets", "EM", "F1", "cover-EM", "answerable"], lines)


def _estimate(found: dict[str, Any]) -> str:
    """The mean, and the interval of the mean over the full sets."""
    low, high = found["full"]
    return f"{_share(found['mean'])} ({_share(low)} to {_share(high)})"


def startup() -> str:
    """How long the command takes to start."""
    lines = []
    for name, row in load("startup")["commands"].items():
        lines.append([f"`{name}`", f"{1000 * row['wall_s']:.0f} ms", f"{row['wall_ratio']:.1f}×"])
    return table(["command", "median", "against an empty interpreter"], lines)


def lexical() -> str:
    """Questions a second of bm25 and Lucene, and what they need, at growing corpora."""
    lines = []
    for row in load("lexical")["rows"]:
        ours, theirs = row["bm25"], row["lucene"]
        overlap = _share(row["overlap"]) if "overlap" in row else ""
        lines.append(
            [f"{row['passages']:,}", str(row["threads"]), _rate(ours["qps"]), _rate(theirs["qps"]),
             f"{row['ratio']:.1f}×", f"{ours['build_s']:,.0f} s", f"{theirs['build_s']:,.0f} s",
             f"{row['build_ratio']:.1f}×", overlap]
        )  # fmt: skip
    headers = ["passages", "threads", "`bm25`, questions/s", "Lucene, questions/s", "ratio", "build",
               "Lucene's", "ratio", "top-3 overlap"]  # fmt: skip
    return table(headers, lines)


def lexical_memory() -> str:
    """What both hold and how long they take to open."""
    lines = []
    for row in load("lexical")["rows"]:
        if row["threads"] == 1:
            cells = [_holds(row[retriever]) for retriever in ("bm25", "lucene")]
            lines.append([f"{row['passages']:,}", *cells[0], *cells[1]])
    headers = ["passages", "`bm25` opens in", "own + mapped memory", "to build", "Lucene opens in",
               "own + mapped memory", "to build"]  # fmt: skip
    return table(headers, lines)


def _holds(retriever: dict[str, Any]) -> list[str]:
    held = f"{retriever['own_mib']:,} + {retriever['mapped_mib']:,} MiB"
    return [f"{retriever['open_s']:.1f} s", held, f"{retriever['build_peak_mib']:,} MiB"]


def _rate(figure: dict[str, float]) -> str:
    return f"{figure['median']:,.0f} ({figure['low']:,.0f} to {figure['high']:,.0f})"


def server() -> str:
    """Each load on each server, and the ratio to Search-R1's form."""
    lines = []
    for load_name, servers in load("server")["loads"].items():
        theirs = servers["Search-R1's form"]["questions_per_s"]["median"]
        for name, figures in servers.items():
            rate = figures["questions_per_s"]
            lines.append(
                [load_name, name, _rate(rate), f"{rate['median'] / theirs:.1f}×",
                 _ms(figures["p50_ms"]), _ms(figures["p99_ms"])]
            )  # fmt: skip
    return table(["load", "server", "questions/s", "ratio", "p50", "p99"], lines)


def _ms(figure: dict[str, float]) -> str:
    return f"{figure['median']:,.1f} ms"


def quality() -> str:
    """Four ways to search the same questions."""
    names = ["recall@1", "recall@3", "recall@10", "nDCG@10", "MRR"]
    lines = [
        [row["retriever"], *(_share(row[name]) for name in names), f"{row['questions_per_s']:,.0f}"]
        for row in load("retrieval_table")["rows"]
    ]
    return table(["retriever", *names, "questions/s"], lines)


def families() -> str:
    """What the check says of each family, and how far sampling and training are apart where it passes."""
    rows = load("families")["rows"]
    lines = []
    for name in (name for name in rows if not name.endswith(", LoRA")):
        both = rows[name], rows[f"{name}, LoRA"]
        gaps = [row["gap"] for row in both if row["outcome"] != "refused"]
        lines.append([name, *map(_outcome, both), f"{max(gaps):.0e}" if gaps else ""])
    return table(["family", "all weights", "LoRA", "largest gap"], lines)


def _outcome(row: dict[str, Any]) -> str:
    if row["outcome"] == "refused":
        return "refused"
    ways = [*([] if row["cached"] else ["no cache"]), *([] if row["packed"] else ["padded rows"])]
    return ", ".join(ways) or "right"


PAGES = ("README.md", "docs/models.md", "docs/retrieval.md", "docs/search-server.md", "docs/scale.md",
         "docs/performance.md", "docs/results.md", "docs/stability.md", "docs/inspect.md",
         "docs/algorithms.md")  # fmt: skip
TABLES: dict[str, Callable[[], str]] = {
    "families": families,
    "learning": learning,
    "recall": recall,
    "startup": startup,
    "real_evaluation": real_evaluation,
    "real_evaluation_means": real_evaluation_means,
    "lexical": lexical,
    "lexical_memory": lexical_memory,
    "server": server,
    "quality": quality,
    **algorithm_tables.TABLES,
    **log_tables.TABLES,
    **real_tables.TABLES,
    **stability_tables.TABLES,
    **scale_tables.TABLES,
    **speed_tables.TABLES,
    **verl_tables.TABLES,
}


def rendered(page: str) -> str:
    return BLOCK.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], page)


def main() -> int:
    differs = 0
    for path in (ROOT / name for name in PAGES):
        page = path.read_text(encoding="utf-8")
        new = rendered(page)
        differs += new != page
        if "--check" not in sys.argv[1:]:
            path.write_text(new, encoding="utf-8")
    return int(differs > 0 and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
