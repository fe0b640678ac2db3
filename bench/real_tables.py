"""The tables of the real model that learns to search, from the result of `bench/real`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.markdown_table import table
from bench.real.measure import BASE
from bench.real.parts import AS_MANY

RESULT = Path(__file__).parent / "results" / "real_learning.json"
SHORTER = RESULT.with_name("real_learning_shorter.json")
"""Results with a cold start of half as many steps, after which RL asked all questions."""
ORDER = (
    "closed-book", "R1 without search", "base as it is", "base, few-shot", "retrieve-once RAG, fine-tuned",
    "cold start", "+ GRPO", "+ PPO", "+ the settings of tiny-hard", "+ GRPO, retrieved tokens trained",
    "+ rejection sampling", f"+ GRPO, {AS_MANY} steps",
)  # fmt: skip
TESTS = {"all": "all", "hops>1": "several hops", "no comparisons": "no comparisons"}
"""The paired tests, and the questions that each is about."""
SUMMARY = ("", "questions", "EM (95%)", "EM, several hops", "EM, no comparisons", "searches")
NOTHING = "Nothing has been measured yet: `make bench-real`.\n"
MEAN = "mean over sets"


def load(file: Path | None = None) -> dict[str, Any]:
    """The results in `file`, by default those of the recipe as it is."""
    file = file or RESULT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"rows": {}}


def measured(file: Path | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of each seed with its name, in the order of the table.

    The names of rows that were trained have the seed if the table has several.
    """
    rows = load(file)["rows"]
    several = len({seed for seeds in rows.values() for seed in seeds}) > 1
    for name in (name for name in ORDER if name in rows):
        for seed, row in sorted(rows[name].items()):
            yield (f"{name}, seed {seed}" if several and name not in BASE.values() else name), row


def learning(file: Path | None = None) -> str:
    """EM on the mean over sets, F1, EM of the questions of several hops, of those that compare no two things
    and of each set, searches."""
    headers, *lines = figures(file)
    return table(headers, lines) if lines else NOTHING


def summary() -> str:
    """The columns of `learning` that the README has."""
    headers, *lines = figures()
    places = [headers.index(name) for name in SUMMARY]
    return table(SUMMARY, [[line[place] for place in places] for line in lines]) if lines else NOTHING


def figures(file: Path | None = None) -> list[list[str]]:
    """The header, and a line for each row."""
    lines, names = [], list[str]()
    for name, row in measured(file):
        sets = {one["name"]: one["measures"] for one in row["sets"]}
        names = names or [one for one in sets if one != MEAN and one != "all questions"]
        means = [estimate(sets[MEAN][measure], "full") for measure in ("em", "f1")]
        each = [share(sets[one]["em"]["mean"]) for one in names]
        several = share(row["groups"]["hops>1"]["em"]["mean"])
        others = share(em_without_comparisons(row["groups"]))
        searches = f"{row['groups']['all']['searches']:.2f}"
        lines.append([name, f"{row['questions']:,}", *means, several, others, *each, searches])
    headers = [
        "",
        "questions",
        "EM (95%)",
        "F1 (95%)",
        "EM, several hops",
        "EM, no comparisons",
        *names,
        "searches",
    ]
    return [headers, *lines]


def em_without_comparisons(groups: Mapping[str, Any]) -> float:
    """EM of the questions whose answer is not one of two things that they name."""
    names = [name for name in groups if name.startswith("type=") and name.endswith("comparison")]
    every, compared = groups["all"], [groups[name] for name in names]
    right = every["questions"] * every["em"]["mean"] - sum(
        one["questions"] * one["em"]["mean"] for one in compared
    )
    return right / (every["questions"] - sum(one["questions"] for one in compared))


def groups() -> str:
    """EM of each row by hops, and by type of question within a set."""
    rows = list(measured())
    found = dict.fromkeys(name for _, row in rows for name in row["groups"])
    named = [name for name in sorted(found) if name.startswith(("hops=", "type="))]
    lines = [
        [name.replace("=", " ", 1), *(group_em(row["groups"].get(name)) for _, row in rows)] for name in named
    ]
    return table(["EM (95%), questions", *(name for name, _ in rows)], lines) if lines else NOTHING


def group_em(found: Mapping[str, Any] | None) -> str:
    return "" if found is None else f"{estimate(found['em'], 'interval')}, {found['questions']:,}"


def behaviour() -> str:
    """What a row searched, saw, made of it, and how long it wrote and trained."""
    lines = []
    for name, row in measured():
        every, coverage = row["groups"]["all"], row["metrics"].get("answerable")
        cells = [coverage, every["evidence"], every["all_evidence"], every["em_evidence"]]
        trained = f"{row['minutes']:,.0f} min, {row['steps']:,} steps" if "minutes" in row else ""
        if row.get("sampled"):
            trained += f", {row['sampled']:,} tokens sampled"
        lines.append(
            [name, f"{every['searches']:.2f}", *map(share, cells), f"{every['tokens']:.0f}", trained]
        )
    headers = ["", "searches", "answerable", "gold passages shown", "all of them shown", "EM where all were",
               "tokens written", "training"]  # fmt: skip
    return table(headers, lines) if lines else NOTHING


def differences(file: Path | None = None) -> str:
    """The paired tests: all questions, those of several hops, and those that compare no two things."""
    lines = []
    for name, seeds in load(file).get("compared", {}).items():
        for seed, found in sorted(seeds.items()):
            lines += [
                [f"{name}, seed {seed}", questions, *difference(found[key])]
                for key, questions in TESTS.items()
                if found.get(key) is not None
            ]
    headers = ["", "which", "questions", "EM before", "after", "difference (95%)", "p"]
    return table(headers, lines) if lines else NOTHING


def difference(found: Mapping[str, Any]) -> list[str]:
    low, high = found["interval"] or (None, None)
    between = "" if low is None else f" ({low:+.3f} to {high:+.3f})"
    p = "<.001" if found["p"] < 0.001 else share(found["p"])
    cells = [f"{found['questions']:,}", share(found["before"]), share(found["after"])]
    return [*cells, f"{found['difference']:+.3f}{between}", p]


def transcript() -> str:
    """The chosen question before and after, of the first seed that has one."""
    seeds = load().get("transcript", {}).get("grpo", {})
    found = next((one for _, one in sorted(seeds.items()) if "before" in one), None)
    if found is None:
        return NOTHING
    asked = found["before"]
    golds = " | ".join(asked["golden_answers"])
    lines = ["```text", f"question  {asked['question']}      gold  {golds}"]
    for name, title in (("before", "cold start"), ("after", "after GRPO")):
        lines += ["", f"{title}: {found[name]['answer'] or 'no answer'} ({found[name]['verdict']})"]
        for segment in found[name]["segments"]:
            mark = "┃" if segment["kind"] == "policy" else "┊"
            lines += [f"{mark} {line}" for line in segment["text"].splitlines() if line.strip()]
    rule = f"\n{found['fitting']:,} of {found['of']:,} two-hop questions fit the rule.\n"
    return "\n".join([*lines, "```"]).replace("<!--", "<! --") + "\n" + rule


def estimate(found: Mapping[str, Any], which: str) -> str:
    """The mean with an interval, where there is one."""
    held = found[which]
    return share(found["mean"]) + (f" ({share(held[0])} to {share(held[1])})" if held else "")


def share(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}".lstrip("0") if value < 1 else f"{value:.3f}"


TABLES: dict[str, Callable[[], str]] = {
    "real_learning": learning,
    "real_learning_summary": summary,
    "real_learning_groups": groups,
    "real_learning_behaviour": behaviour,
    "real_learning_differences": differences,
    "real_learning_transcript": transcript,
    "real_learning_shorter": lambda: learning(SHORTER),
    "real_learning_shorter_differences": lambda: differences(SHORTER),
}
