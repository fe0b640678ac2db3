"""Write the tables of README.md and docs from `bench/results/*.json`, between their markers.

    python bench/tables.py [--check]

A table is between `<!-- table: NAME -->` and `<!-- end -->`. With `--check` nothing is written, and the exit
code is 1 if a page differs from the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
REAL_ROWS = (
    "closed-book", "R1 without search", "base as it is", "base, few-shot", "retrieve-once RAG, fine-tuned",
    "cold start", "+ GRPO", "+ PPO", "+ GRPO, retrieved tokens trained", "+ rejection sampling",
    "+ GRPO, 24 steps",
)  # fmt: skip
README_ROWS = (
    "closed-book", "base as it is", "base, few-shot", "retrieve-once RAG, fine-tuned, seed 0",
    "cold start, seed 0", "+ GRPO, seed 0", "cold start, seed 1", "+ GRPO, seed 1",
)  # fmt: skip
BASE = ("closed-book", "base as it is", "base, few-shot")
"""Rows of the model as it comes, which have no seed."""
SUBSETS = {"all": "all", "hops>1": "several hops", "no comparisons": "no comparisons"}
"""The paired tests, and the questions that each is about."""
SHAPES = {"real": "134.5 M parameters", "tiny": "0.7 M parameters"}


def load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown; the first column is aligned to the left, the others to the right."""
    lines = [headers, ["---"] + ["--:"] * (len(headers) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def share(value: float | None) -> str:
    """`.123`; nothing for None."""
    return "" if value is None else f"{value:.3f}".removeprefix("0")


def estimate(measure: Mapping[str, Any]) -> str:
    """A mean, and the 95% interval of the mean over the full test sets."""
    low, high = measure["full"]
    return f"{share(measure['mean'])} ({share(low)} to {share(high)})"


def spread(values: Sequence[float]) -> str:
    """The mean over seeds, and the range."""
    low, high = share(min(values)), share(max(values))
    return share(mean(values)) + (f" ({low} to {high})" if low != high else "")


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 1 else f"{value:.2f} s"


def memory(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 2048 else f"{mib:,.0f} MiB"


# What is learned


def learning() -> str:
    """The made-up world: where a run starts, and what each kind of run makes of it."""
    lines = []
    for name, row in load("learning")["rows"].items():
        if isinstance(row, dict):
            ems = [share(row[key]) for key in ("em", "em_1_hop", "em_2_hops")]
            lines.append([name, *ems, f"{row['searches']:.2f}", share(row["pass_at_8"]), ""])
        else:
            ends = [run["end"] for run in row]
            ems = [spread([end[key] for end in ends]) for key in ("em", "em_1_hop", "em_2_hops")]
            seeds = f"{len(row)} seed{'s' * (len(row) > 1)}"
            lines.append([f"**{name}**, {row[0]['steps']} steps, {seeds}", *ems,
                          f"{mean(end['searches'] for end in ends):.2f}", "",
                          spread([run["start"]["em"] for run in row])])  # fmt: skip
    return table(
        ["1,024 test questions", "EM", "one hop", "two hops", "searches", "pass@8", "EM before"], lines
    )


def verl_learning() -> str:
    """Greedy exact match over the steps, each algorithm on both backends."""
    result = load("verl_learning")
    steps = sorted({int(step) for row in result["rows"].values() for step in row["val"]})
    headers = [f"greedy EM, {result['questions']} validation questions", *(f"step {step}" for step in steps)]
    lines = [
        [name, *(share(row["val"].get(str(step))) for step in steps), share(row["end"]["em"])]
        for name, row in result["rows"].items()
    ]
    return table([*headers, "test"], lines)


def real_rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of each seed of the real model, in the order of the table."""
    rows = load("real_learning")["rows"]
    for name in (name for name in REAL_ROWS if name in rows):
        for seed, row in sorted(rows[name].items()):
            yield (name if name in BASE else f"{name}, seed {seed}"), row


def em_without_comparisons(groups: Mapping[str, Any]) -> float:
    """EM of the questions whose answer is not one of two things that they name."""
    everything = groups["all"]
    right, count = everything["questions"] * everything["em"]["mean"], everything["questions"]
    for name, group in groups.items():
        if name.startswith("type=") and name.endswith("comparison"):
            right -= group["questions"] * group["em"]["mean"]
            count -= group["questions"]
    return right / count


def real_learning() -> str:
    """EM of every row on the mean over sets, on some questions, and on each set."""
    lines, names = [], list[str]()
    for name, row in real_rows():
        sets = {each["name"]: each["measures"] for each in row["sets"]}
        names = [each for each in sets if each not in ("mean over sets", "all questions")]
        lines.append([
            name, f"{row['questions']:,}", estimate(sets["mean over sets"]["em"]),
            share(row["groups"]["hops>1"]["em"]["mean"]), share(em_without_comparisons(row["groups"])),
            *(share(sets[each]["em"]["mean"]) for each in names),
            f"{row['groups']['all']['searches']:.2f}",
        ])  # fmt: skip
    headers = ["", "questions", "EM (95%)", "EM, several hops", "EM, no comparisons", *names, "searches"]
    return table(headers, lines)


def real_learning_summary() -> str:
    """Some rows and columns of `real_learning`, for the README."""
    lines = []
    for name, row in real_rows():
        if name in README_ROWS:
            [em] = [each["measures"]["em"] for each in row["sets"] if each["name"] == "mean over sets"]
            groups, others = row["groups"], em_without_comparisons(row["groups"])
            several, searches = groups["hops>1"]["em"]["mean"], groups["all"]["searches"]
            lines.append([name, estimate(em), share(several), share(others), f"{searches:.2f}"])
    lines.sort(key=lambda line: README_ROWS.index(line[0]))
    return table(["", "EM (95%)", "several hops", "no comparisons", "searches"], lines)


def native_real() -> str:
    """The cold start of the real model by native calls, beside those by tags."""
    tags, native = load("real_learning")["rows"]["cold start"], load("native_real")["rows"]["cold start"]
    lines = []
    for name, seeds in (("tags", tags), ("native calls", native)):
        for seed, row in sorted(seeds.items()):
            [em] = [each["measures"]["em"] for each in row["sets"] if each["name"] == "mean over sets"]
            malformed = row["metrics"].get("env/malformed_calls")
            lines.append([
                f"{name}, seed {seed}", f"{row['questions']:,}", estimate(em),
                share(row["groups"]["hops>1"]["em"]["mean"]), f"{row['groups']['all']['tokens']:.0f}",
                f"{row['groups']['all']['searches']:.2f}", "" if malformed is None else f"{malformed:.4f}",
            ])  # fmt: skip
    headers = ["cold start", "questions", "EM (95%)", "several hops", "tokens", "searches", "malformed calls"]
    return table(headers, lines)


def real_learning_differences() -> str:
    """The paired tests: all questions, those of several hops, and those that compare no two things."""
    lines = []
    for name, seeds in load("real_learning")["compared"].items():
        for seed, tests in sorted(seeds.items()):
            for key, questions in SUBSETS.items():
                if test := tests.get(key):
                    p = "<.001" if test["p"] < 0.001 else share(test["p"])
                    lines.append([f"{name}, seed {seed}", questions, f"{test['questions']:,}",
                                  share(test["before"]), share(test["after"]),
                                  f"{test['difference']:+.3f}", p])  # fmt: skip
    return table(["", "which", "questions", "EM before", "after", "difference", "p"], lines)


def real_learning_transcript() -> str:
    """The question that the rule of bench/real chooses, before and after GRPO."""
    seeds = load("real_learning")["transcript"]["grpo"]
    result = next(each for _, each in sorted(seeds.items()) if "before" in each)
    golds = " | ".join(result["before"]["golden_answers"])
    lines = ["```text", f"question  {result['before']['question']}      gold  {golds}"]
    for name, title in (("before", "cold start"), ("after", "after GRPO")):
        lines += ["", f"{title}: {result[name]['answer'] or 'no answer'} ({result[name]['verdict']})"]
        for segment in result[name]["segments"]:
            mark = "┃" if segment["kind"] == "policy" else "┊"
            lines += [f"{mark} {line}" for line in segment["text"].splitlines() if line.strip()]
    return "\n".join([*lines, "```"]).replace("<!--", "<! --") + "\n"


# Retrieval


def rate(figure: Mapping[str, float]) -> str:
    return f"{figure['median']:,.0f} ({figure['low']:,.0f} to {figure['high']:,.0f})"


def lexical() -> str:
    """Questions a second of bm25 and Lucene, and what they need, at growing corpora."""
    lines = []
    for row in load("lexical")["rows"]:
        ours, theirs = row["bm25"], row["lucene"]
        overlap = share(row["overlap"]) if "overlap" in row else ""
        lines.append([
            f"{row['passages']:,}", str(row["threads"]), rate(ours["qps"]), rate(theirs["qps"]),
            f"{row['ratio']:.1f}×", f"{ours['build_s']:,.0f} s", f"{theirs['build_s']:,.0f} s",
            f"{row['build_ratio']:.1f}×", overlap,
        ])  # fmt: skip
    headers = ["passages", "threads", "`bm25`, questions/s", "Lucene, questions/s", "ratio", "build",
               "Lucene's", "ratio", "top-3 overlap"]  # fmt: skip
    return table(headers, lines)


def lexical_memory() -> str:
    """What both hold and how long they take to open."""
    lines = []
    for row in load("lexical")["rows"]:
        if row["threads"] == 1:
            cells = [f"{row['passages']:,}"]
            for each in (row["bm25"], row["lucene"]):
                cells += [f"{each['open_s']:.1f} s", f"{each['own_mib']:,} + {each['mapped_mib']:,} MiB",
                          f"{each['build_peak_mib']:,} MiB"]  # fmt: skip
            lines.append(cells)
    headers = ["passages", "`bm25` opens in", "own + mapped memory", "to build", "Lucene opens in",
               "own + mapped memory", "to build"]  # fmt: skip
    return table(headers, lines)


def recall() -> str:
    """BM25's recall of a question's own paragraph."""
    names = [f"recall@{k}" for k in (1, 3, 5, 10)]
    lines = [
        [f"{row['stopwords']}, {row['stemmer']}", *(share(row[name]) for name in names)]
        for row in load("retrieval_quality")["rows"]
    ]
    return table(["stop words, stemmer", *names], lines)


def server() -> str:
    """Each load on each server, and the ratio to Search-R1's form."""
    lines = []
    for load_name, servers in load("server")["loads"].items():
        theirs = servers["Search-R1's form"]["questions_per_s"]["median"]
        for name, figures in servers.items():
            questions = figures["questions_per_s"]
            lines.append([
                load_name, name, rate(questions), f"{questions['median'] / theirs:.1f}×",
                f"{figures['p50_ms']['median']:,.1f} ms", f"{figures['p99_ms']['median']:,.1f} ms",
            ])  # fmt: skip
    return table(["load", "server", "questions/s", "ratio", "p50", "p99"], lines)


# Speed, models, the log


def speed(point: str) -> dict[str, Any]:
    return load("speed")["points"][point]["results"]


def speed_rollout() -> str:
    """Each contender on two threads, and its time by ours on one and on two."""
    result, lines = speed("rollout"), []
    for shape, words in SHAPES.items():
        alone = result[f"{shape}, 1 threads"]
        for name, row in result[f"{shape}, 2 threads"].items():
            tokens = f"{row['tokens_per_s']:,.0f}" if "tokens_per_s" in row else ""
            single = f"{alone[name]['times_ours']:.2f}×" if name in alone else ""
            lines.append([f"{name} ({words})", seconds(row["seconds"]), tokens, f"{row['times_ours']:.2f}×",
                          single, memory(row["peak_mib"])])  # fmt: skip
    return table(["rollout", "2 threads", "tokens/s", "× ours", "1 thread, × ours", "peak memory"], lines)


def speed_step() -> str:
    """Where a step's time goes, in each contender."""
    lines = []
    for shape, contenders in speed("step").items():
        for name, row in contenders.items():
            parts = [seconds(row[part]) if part in row else "in the update" for part in
                     ("generation", "log_probs", "update")]  # fmt: skip
            lines.append([f"{name} ({SHAPES[shape]})", seconds(row["seconds"]), *parts,
                          f"{row['times_ours']:.2f}×", memory(row["peak_mib"])])  # fmt: skip
    return table(["a step", "all", "generation", "log-probs", "update", "× ours", "peak memory"], lines)


TABLES: dict[str, Callable[[], str]] = {
    made.__name__: made
    for made in (
        learning, verl_learning, real_learning, real_learning_summary, native_real,
        real_learning_differences, real_learning_transcript, lexical, lexical_memory, recall,
        server, speed_rollout, speed_step,
    )
}  # fmt: skip


def rendered(page: str) -> str:
    """The page with its tables as the results say. Raises KeyError for a table that is not one of ours."""
    return BLOCK.sub(lambda block: block[1] + TABLES[block[2]]() + block[3], page)


def main() -> int:
    check, differ = "--check" in sys.argv[1:], []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        page = path.read_text(encoding="utf-8")
        if (new := rendered(page)) != page:
            differ.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and differ:
        print(f"{', '.join(differ)}: other tables than bench/results has; run: make docs", file=sys.stderr)
    return int(check and bool(differ))


if __name__ == "__main__":
    sys.exit(main())
