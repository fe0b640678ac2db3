"""Evaluations compared on the questions that all of them have: measures by data source, paired tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import duckdb

from srl.errors import UserError
from srl.evaluate.episode_results import EpisodeResult, read_results
from srl.evaluate.intervals import Interval, interval, too_few_clusters
from srl.evaluate.paired_tests import holm, paired_test
from srl.evaluate.question_sets import MEASURES
from srl.store import reading, rows

ALL = "all"
_SAME_DATA = "evaluate them on the same --data"
LEVEL = 0.05
"""A difference with a corrected p-value above it is not significant."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation from its log: the samples of each question.

    `asked` has the source, the text and the golden answers of each question.
    """

    run: str
    status: str
    model: str
    setting: str
    index_digest: str
    samples: Mapping[str, Sequence[EpisodeResult]]
    asked: Mapping[str, tuple[str, str, tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure of one run on the questions of a source, and its difference from the first run.

    `interval` is None where the questions come from too few documents; the difference and its test are None
    for the first run. `p_corrected` is corrected for all tests of the comparison.
    """

    source: str
    questions: int
    measure: str
    run: str
    value: float
    interval: Interval | None
    difference: float | None = None
    difference_interval: Interval | None = None
    p: float | None = None
    p_corrected: float | None = None
    significant: bool | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs on their common questions; `left_out` are how many further questions each run has."""

    runs: Sequence[Evaluated]
    questions: int
    left_out: Sequence[int]
    rows: Sequence[Measured]
    notes: Sequence[str]

    @property
    def tests(self) -> int:
        return sum(row.p is not None for row in self.rows)


def read_evaluation(run: Path) -> Evaluated:
    """The evaluation in the directory `run`. Raises UserError for a training run, or without episodes."""
    return reading([run], lambda log: _read(log, run))


def _read(log: duckdb.DuckDBPyConnection, run: Path) -> Evaluated:
    about = rows(log, "SELECT run_id, status, model, index_digest, config FROM runs")
    if len(about) != 1:
        raise UserError(f"{run} has the logs of {len(about)} runs, expected one")
    samples = defaultdict(list)
    for result in read_results(log):
        samples[result.question_id].append(result)
    if not samples:
        raise UserError(f"{run.name} is not an evaluation, or has no finished question yet")
    query = "SELECT DISTINCT question_id, data_source, question, golden_answers FROM trajectories"
    questions = {
        name: (source, text, tuple(answers))
        for name, source, text, answers in log.execute(f"{query} WHERE phase = 'eval'").fetchall()
    }
    first, config = about[0], json.loads(about[0]["config"])
    return Evaluated(
        first["run_id"], first["status"], first["model"], str(config.get("setting") or ""),
        first["index_digest"], dict(samples), questions,
    )  # fmt: skip


def compare(runs: Sequence[Evaluated]) -> Comparison:
    """Compare evaluations on the questions that all of them have; the first is the baseline.

    A question's value is the mean of its samples. Raises UserError where no question is in all of them, or
    one differs between them.
    """
    common = sorted(set.intersection(*(set(run.samples) for run in runs)))
    if not common:
        sources = (
            f"{name_of(number)} asks {', '.join(sorted({source for source, *_ in run.asked.values()}))}"
            for number, run in enumerate(runs)
        )
        raise UserError(f"no question is in all of these runs: {'; '.join(sources)}", hint=_SAME_DATA)
    for number, run in enumerate(runs[1:], 1):
        if changed := [name for name in common if run.asked[name] != runs[0].asked[name]]:
            what = f"{changed[0]} has another source, text or golden answers in {name_of(number)} than in A"
            raise UserError(f"question {what}", hint=_SAME_DATA)
    parts = groups({name: runs[0].asked[name][0] for name in common})
    table = []
    for source, names in parts.items():
        documents = [runs[0].samples[name][0].cluster for name in names]
        for field, measure in MEASURES.items():
            values = {
                run.run: [fmean(getattr(sample, field) for sample in run.samples[name]) for name in names]
                for run in runs
            }
            table += measured(source, measure, values, documents)
    ps = iter(holm([row.p for row in table if row.p is not None]))
    table = [
        row if row.p is None else replace(row, p_corrected=(p := next(ps)), significant=p <= LEVEL)
        for row in table
    ]
    left_out = [len(run.samples) - len(common) for run in runs]
    return Comparison(runs, len(common), left_out, table, _notes(runs, common, parts))


def name_of(run: int) -> str:
    """The letter by which a table names a run: A for the first."""
    return chr(ord("A") + run)


def groups(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Questions by their source, given by `sources` for each, and of all where there are several."""
    by_source = defaultdict(list)
    for name, source in sources.items():
        by_source[source].append(name)
    parts = {source: by_source[source] for source in sorted(by_source)}
    return parts | ({ALL: list(sources)} if len(parts) > 1 else {})


def measured(
    source: str, measure: str, values: Mapping[str, Sequence[float]], documents: Sequence[Hashable]
) -> list[Measured]:
    """One measure of every run on the same questions, from the values by run; the first is the baseline."""
    table, baseline = list[Measured](), next(iter(values.values()))
    for run, own in values.items():
        test = astuple(paired_test(baseline, own, documents)) if table else ()
        about = (source, len(own), measure, run, fmean(own), interval(own, documents))
        table.append(Measured(*about, *test))
    return table


def _notes(runs: Sequence[Evaluated], common: Sequence[str], parts: Mapping[str, Sequence[str]]) -> list[str]:
    """What a reader of the table has to know about the runs."""
    notes = []
    for number, run in enumerate(runs):
        if run.status != "finished":
            notes.append(f"{name_of(number)} is {run.status}: the table has the questions that it has so far")
        failed = sum(not sample.valid for name in common for sample in run.samples[name])
        if failed:
            notes.append(f"{name_of(number)}: {failed:,} episodes were lost to faults and count 0")
    for first, second in combinations(range(len(runs)), 2):
        digests = runs[first].index_digest, runs[second].index_digest
        if all(digests) and digests[0] != digests[1]:
            pair = f"{name_of(first)} and {name_of(second)}"
            notes.append(f"{pair} searched different indexes: {digests[0]:.12}, {digests[1]:.12}")
    for source, names in parts.items():
        if too_few := too_few_clusters([runs[0].samples[name][0].cluster for name in names]):
            notes.append(f"{source} has no intervals: {too_few}")
    return notes
