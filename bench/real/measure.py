"""The parts that measure: evaluations, paired comparisons, curves from the logs, and a transcript."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.real.commands import SMALL, Bench, Trained, options
from bench.real.parts import AS_MANY, digest

from srl.evaluate.episode_results import EpisodeResult, read_results
from srl.evaluate.intervals import interval
from srl.evaluate.paired_tests import paired_test
from srl.store import reading

ENDS, OTHERS = 1500, 400
"""Test questions for the rows that the goals are about, and for other rows."""
BASELINES = ("closed-book", "few-shot")
CURVES = (
    "response_length/mean", "env/number_of_valid_search", "env/ratio_of_valid_action", "critic/score/mean",
    "env/malformed_calls", "train/em", "val/em",
)  # fmt: skip
KINDS = ("rows", "compared", "curves", "transcript")
"""What is measured, each by name and seed."""
SHOWN = 200
"""Characters of a passage in the transcript."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: the run of training that it measures, and the row that it is compared with."""

    run: str
    budget: int
    against: str = ""


ROWS = {
    "retrieve-once RAG, fine-tuned": Row("rag", ENDS),
    "R1 without search": Row("r1", OTHERS),
    "cold start": Row("cold-start", ENDS),
    "+ GRPO": Row("grpo", ENDS, "cold start"),
    "+ PPO": Row("ppo", ENDS, "cold start"),
    "+ rejection sampling": Row("rft", ENDS, "cold start"),
    f"+ GRPO, {AS_MANY} steps": Row(f"grpo-{AS_MANY}", ENDS, "cold start"),
    "+ GRPO, retrieved tokens trained": Row("grpo-no-mask", ENDS, "+ GRPO"),
}
ONCE = ("rag",)
"""Baselines that are made with seed 0 alone, for every seed."""
BASE = {"search": "base as it is", "closed-book": "closed-book", "few-shot": "base, few-shot"}
"""The names of the base's settings."""


def base(bench: Bench) -> None:
    """Measure the base as it is and its baselines, which depend on nothing that is trained."""

    def make() -> dict[str, Any]:
        known = ["--preset", bench.preset, *(part for name in BASELINES for part in ("--baseline", name))]
        report = asked(bench, bench.model, OTHERS, *known, *options(list(small(bench))))
        return {name: row(bench, report[setting], bench.evaluations) for setting, name in BASE.items()}

    bench.once("row-base", make)


def evaluate(bench: Bench) -> None:
    """Measure every run that has been trained with this seed, and test the pairs."""
    for name, one in ROWS.items():
        if bench.trained(one.run) is not None:
            bench.once(f"row-{bench.key(one.run)}", partial(trained_row, bench, name))
    pairs = {name: (ROWS[one.against].run, one.run) for name, one in ROWS.items() if one.against}
    pairs["+ GRPO against RAG"] = ("rag", "grpo")
    pairs["+ GRPO against rejection sampling"] = ("rft", f"grpo-{AS_MANY}")
    for name, (before, after) in pairs.items():
        first, second = baseline(bench, before), measured(bench, after)
        if first and second:
            key = f"compared-{before}-{after}-s{bench.seed}"
            bench.once(key, partial(compared, bench, name, first, second))


def small(bench: Bench) -> Iterable[str]:
    """The settings of the smoke run that an evaluation can have."""
    return [one for one in SMALL if one.startswith(("rollout.max", "data.max"))] if bench.smoke else []


def asked(bench: Bench, model: object, budget: int, *more: object) -> dict[str, Any]:
    """The report of an evaluation on a fixed sample of the test questions, of each set as many; greedy.

    Of the settings that were given for training runs it has those of the model, such as its precision.
    """
    limit = 8 if bench.smoke else min(budget, bench.budget or budget)
    of_model = [one for one in bench.sets if one.startswith("model.")]
    out = bench.srl(
        bench.evaluations, "eval", "run", model, "--data", bench.prepared / "test.parquet", "--index",
        bench.index, "--limit", limit, "--json", *more, *options(of_model),
    )  # fmt: skip
    report: dict[str, Any] = json.loads(out)
    return report


def trained_row(bench: Bench, name: str) -> dict[str, Any]:
    """The row of a run, by its name in the table; of fine-tuning, the best checkpoint by validation."""
    about = ROWS[name]
    found = bench.trained(about.run)
    assert found is not None, "only what was trained is measured"
    best = found.summary["algo"] == "sft"
    report = asked(bench, f"{found.run}{'@best' if best else ''}", about.budget)
    figures = row(bench, report["search" if "search" in report else "no_search"], found.workspace)
    training = {"minutes": found.minutes, "steps": found.summary["steps"], "sampled": sampled(bench, found)}
    return {name: {**figures, **training}}


def sampled(bench: Bench, trained: Trained) -> int:
    """The tokens that the policy wrote in the training episodes of a run."""
    query = "SELECT coalesce(sum(tokens), 0)::BIGINT AS tokens FROM trajectories WHERE phase = 'train'"
    out = bench.srl(trained.workspace, "inspect", "sql", query, "--run", trained.run.name, "--json")
    return int(json.loads(out)["tokens"])


def row(bench: Bench, setting: Mapping[str, Any], workspace: Path) -> dict[str, Any]:
    """The figures of an evaluation in `workspace`: those of its report, and of its log by set, hops and type.

    `place` is its directory, below the cache.
    """
    place = str((workspace / "runs" / setting["run"]).relative_to(bench.cache))
    results = results_of(bench, {**setting, "place": place})
    return {
        "run": setting["run"],
        "place": place,
        "questions": len(results),
        "sets": setting["sets"],
        "metrics": {key: rounded(value) for key, value in setting["metrics"].items()},
        "groups": groups(results),
    }


def results_of(bench: Bench, setting: Mapping[str, Any]) -> list[EpisodeResult]:
    return reading([bench.cache / setting["place"]], read_results)


def groups(results: Sequence[EpisodeResult]) -> dict[str, dict[str, Any]]:
    """EM with its 95% interval and F1 by set, by hops and by type within a set."""
    found: dict[str, list[EpisodeResult]] = defaultdict(list)
    for item in results:
        found["all"].append(item)
        found[f"set={item.data_source}"].append(item)
        found[f"hops={item.hops or 1}"].append(item)
        if (item.hops or 1) > 1:
            found["hops>1"].append(item)
        if item.kind:
            found[f"type={item.data_source}/{item.kind}"].append(item)
    return {name: figures(found[name]) for name in sorted(found)}


def figures(results: Sequence[EpisodeResult]) -> dict[str, Any]:
    clusters = [item.cluster for item in results]
    known = [item.evidence_recall for item in results if item.evidence_recall is not None]
    shown = [item.em for item in results if item.evidence_recall == 1]
    return {
        "questions": len(results),
        "em": estimate([item.em for item in results], clusters),
        "f1": estimate([item.f1 for item in results], clusters),
        "searches": rounded(fmean(item.valid_searches for item in results)),
        "tokens": rounded(fmean(item.tokens for item in results)),
        "evidence": rounded(fmean(known)) if known else None,
        "all_evidence": rounded(len(shown) / len(results)),
        "em_evidence": rounded(fmean(shown)) if shown else None,
    }


def estimate(values: Sequence[float], clusters: Sequence[Any]) -> dict[str, Any]:
    held = interval(values, clusters)
    return {"mean": rounded(fmean(values)), "interval": held and [rounded(held.low), rounded(held.high)]}


def rounded(value: float) -> float:
    return round(value, 4)


def measured(bench: Bench, run: str) -> dict[str, Any] | None:
    """The row of a run with this seed, if it has been measured."""
    file = bench.state(f"row-{bench.key(run)}")
    return None if not file.is_file() else next(iter(json.loads(file.read_text())["value"].values()))


def baseline(bench: Bench, run: str) -> dict[str, Any] | None:
    """The row that a run is compared with: of this seed, or where one seed is made of it, of that seed."""
    return measured(bench, run) or (measured(replace(bench, seed=0), run) if run in ONCE else None)


def compared(bench: Bench, name: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The row `after` against that `before`, on the questions that both were asked: all, those of several
    hops, and those whose answer is not one of two things that they name."""
    pairs = paired(results_of(bench, before), results_of(bench, after))
    several = [(a, b) for a, b in pairs if (a.hops or 1) > 1]
    others = [(a, b) for a, b in pairs if not (a.kind or "").endswith("comparison")]
    tests = {"all": pairs, "hops>1": several, "no comparisons": others}
    return {name: {which: difference(some) for which, some in tests.items()}}


def paired(
    before: Iterable[EpisodeResult], after: Iterable[EpisodeResult]
) -> list[tuple[EpisodeResult, EpisodeResult]]:
    """The episodes of the questions that both have."""
    known = {item.question_id: item for item in before}
    return [(known[item.question_id], item) for item in after if item.question_id in known]


def difference(pairs: Sequence[tuple[EpisodeResult, EpisodeResult]]) -> dict[str, Any] | None:
    """EM before and after, the difference with its interval, and p of the paired test."""
    if not pairs:
        return None
    found = paired_test([a.em for a, _ in pairs], [b.em for _, b in pairs], [a.cluster for a, _ in pairs])
    held = found.interval
    return {
        "questions": len(pairs),
        "before": rounded(fmean(a.em for a, _ in pairs)),
        "after": rounded(fmean(b.em for _, b in pairs)),
        "difference": rounded(found.difference),
        "interval": held and [rounded(held.low), rounded(held.high)],
        "p": found.p,
    }


def curves(bench: Bench) -> None:
    """What the papers plot, from the logs of the runs: a value for each step, or each validation."""
    for one in ROWS.values():
        if (found := bench.trained(one.run)) is not None:
            bench.once(f"curves-{bench.key(one.run)}", partial(curves_of, bench, found))


def curves_of(bench: Bench, found: Trained) -> dict[str, Any]:
    """The metrics of `CURVES` that the run has, from `srl inspect curve`."""
    run, query = found.run.name, "SELECT DISTINCT name FROM metrics"
    known = bench.srl(found.workspace, "inspect", "sql", query, "--run", run, "--json")
    names = {json.loads(line)["name"] for line in known.splitlines()}
    wanted = [part for name in CURVES if name in names for part in ("--metric", name)]
    out = bench.srl(found.workspace, "inspect", "curve", run, *wanted, "--json")
    return {
        one["metric"]: {"steps": one["steps"], "values": [rounded(value) for value in one["values"]]}
        for one in map(json.loads, out.splitlines())
    }


def transcript(bench: Bench) -> None:
    """A two-hop question before and after GRPO, chosen by a rule.

    Of those that the cold start answers wrong, and GRPO right with all gold passages shown, it is the first
    by the digest of its id.
    """
    rows = [one for run in ("cold-start", "grpo") if (one := measured(bench, run)) is not None]
    if len(rows) == 2:
        bench.once(f"transcript-grpo-s{bench.seed}", partial(chosen_episodes, bench, *rows))


def chosen_episodes(bench: Bench, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The question that the rule chooses, its episodes, and how many two-hop questions fit the rule."""
    pairs = paired(results_of(bench, before), results_of(bench, after))
    fitting = [b.question_id for a, b in pairs if is_learned(a, b)]
    counts = {"fitting": len(fitting), "of": sum(a.hops == 2 for a, _ in pairs)}
    if not fitting:
        return counts
    name = min(fitting, key=digest)
    episodes = [episode(bench, bench.cache / found["place"], name) for found in (before, after)]
    return {**counts, "question_id": name, "before": episodes[0], "after": episodes[1]}


def is_learned(before: EpisodeResult, after: EpisodeResult) -> bool:
    """Whether a two-hop question was wrong, and is right with all its gold passages shown."""
    return after.hops == 2 and before.em == 0 and after.em == 1 and after.evidence_recall == 1


def episode(bench: Bench, run: Path, question: str) -> dict[str, Any]:
    """An episode of an evaluation: its question, and who wrote what; passages shortened."""
    same = f"question_id = '{question}'"
    listed = bench.srl(bench.evaluations, "inspect", "trajectories", run, "--where", same, "--json")
    name = json.loads(listed.splitlines()[0])["id"]
    found = json.loads(bench.srl(bench.evaluations, "inspect", "show", name, "--run", run, "--json"))
    said = [
        {"kind": segment["kind"], "text": shortened(segment)}
        for segment in found["segments"]
        if segment["kind"] != "prompt"
    ]
    kept = {key: found[key] for key in ("question", "golden_answers", "answer", "verdict", "em")}
    return {**kept, "segments": said}


def shortened(segment: Mapping[str, Any]) -> str:
    """The text of a segment; of an observation each passage to `SHOWN` characters."""
    text = str(segment["text"]).strip()
    if segment["kind"] != "observation":
        return text
    lines = text.removeprefix("<information>").removesuffix("</information>").split("\n")
    return "\n".join(line if len(line) <= SHOWN else f"{line[:SHOWN].rstrip()} …" for line in lines)


PARTS: dict[str, Callable[[Bench], None]] = {
    "base": base,
    "evaluate": evaluate,
    "curves": curves,
    "transcript": transcript,
}


def collected(bench: Bench) -> dict[str, Any]:
    """All that has been measured: rows, comparisons, curves and transcripts by name and seed."""
    found: dict[str, Any] = {kind: {} for kind in KINDS}
    for file in sorted((bench.cache / "state").glob("*.json")):
        value = json.loads(file.read_text(encoding="utf-8"))["value"]
        if file.stem == "demonstrations":
            found["demonstrations"] = value
        elif named := _MEASURED.fullmatch(file.stem):
            kind, run, seed = named[1], named[2], named[3] or "0"
            for name, one in value.items() if kind in ("row", "compared") else [(run, value)]:
                result = {key: part for key, part in one.items() if key not in _OWN}
                found["rows" if kind == "row" else kind].setdefault(name, {})[seed] = result
    return found


def merged(known: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """The results `known` before with those `found` in this cache in their place, by kind, name and seed."""
    result = {**known, **found}
    for kind in KINDS:
        names = dict.fromkeys([*known.get(kind, {}), *found[kind]])
        result[kind] = {
            name: {**known.get(kind, {}).get(name, {}), **found[kind].get(name, {})} for name in names
        }
    return result


_OWN = {"place"}
"""What a row has of this machine."""
_MEASURED = re.compile(r"(row|compared|curves|transcript)-(.+?)(?:-s(\d+))?")
