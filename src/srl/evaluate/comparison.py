"""Evaluations compared on the questions that all of them have: measures by data source, paired tests."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import duckdb

from srl.errors import UserError
from srl.evaluate.coverage import read_coverage
from srl.evaluate.episode_results import EpisodeResult, read_results
from srl.evaluate.intervals import MIN_CLUSTERS, ClusterSums, Interval, interval
from srl.evaluate.paired_tests import PairedTest, holm, paired_test
from srl.store import reading, rows

MEASURES = {"EM": "em", "F1": "f1", "cover-EM": "cover_em"}
"""The measures compared, and their names in an `EpisodeResult`."""
ALL = "all"
ANSWERABLE = "answerable"
"""The questions that the corpus of every run can answer, in the place of a source."""
LEVEL = 0.05
"""A difference with a corrected p-value above it is not significant."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """An evaluation from its log; `asked` has source, text and golden answers of a question.

    `answerable` are the questions that its corpus can answer; None if its coverage is unknown.
    """

    run: str
    status: str
    model: str
    setting: str
    index_digest: str
    results: Sequence[EpisodeResult]
    asked: Mapping[str, tuple[str, str, tuple[str, ...]]]
    answerable: frozenset[str] | None = None

    def of_question(self) -> dict[str, list[EpisodeResult]]:
        """The samples of each question."""
        found = defaultdict(list)
        for result in self.results:
            found[result.question_id].append(result)
        return dict(found)


@dataclass(frozen=True, slots=True)
class Measured:
    """One measure of one run on the questions of a source, and its difference from the first run.

    `interval` is None where the questions come from too few documents; `test` is None for the first run.
    `p` is the test's p-value corrected for all tests of the comparison.
    """

    source: str
    questions: int
    measure: str
    run: int
    value: float
    interval: Interval | None
    test: PairedTest | None = None
    p: float | None = None

    @property
    def significant(self) -> bool | None:
        return None if self.p is None else self.p <= LEVEL


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
        return sum(row.test is not None for row in self.rows)


def read_evaluation(run: Path) -> Evaluated:
    """The evaluation in the directory `run`. Raises UserError for a training run, or without episodes."""
    return reading([run], lambda log: _read(log, run))


def _read(log: duckdb.DuckDBPyConnection, run: Path) -> Evaluated:
    about = rows(log, "SELECT run_id, status, model, index_digest, config FROM runs")
    if len(about) != 1:
        raise UserError(f"{run} has the logs of {len(about)} runs; name one of them")
    results = read_results(log)
    if not results:
        raise UserError(_why_none(log, about[0]["run_id"]))
    config = json.loads(about[0]["config"])
    columns = "question_id, data_source, question, golden_answers"
    asked = rows(log, f"SELECT DISTINCT {columns} FROM trajectories WHERE phase = 'eval'")
    return Evaluated(
        about[0]["run_id"],
        about[0]["status"],
        about[0]["model"],
        str(config.get("setting") or ""),
        about[0]["index_digest"],
        results,
        {
            row["question_id"]: (row["data_source"], row["question"], tuple(row["golden_answers"]))
            for row in asked
        },
        _answerable(run, [row["question_id"] for row in asked]) if _searches(config) else None,
    )


def _searches(config: Mapping[str, Any]) -> bool:
    """Whether a run searches. One that does not has the coverage of the last index evaluated beside it."""
    return bool(config.get("rollout", {}).get("search", True))


def _answerable(run: Path, asked: Sequence[str]) -> frozenset[str] | None:
    """The answerable questions of a run; None where the coverage of one that was `asked` is unknown."""
    covered = read_coverage(run)
    if covered is None or not covered.found.keys() >= set(asked):
        return None
    return frozenset(name for name, one in covered.found.items() if one.answerable)


def _why_none(log: duckdb.DuckDBPyConnection, run: str) -> str:
    phases = rows(log, "SELECT DISTINCT phase FROM trajectories")
    if not phases:
        return f"{run} has no finished question yet; compare it when it has some"
    return (
        f"{run} is a training run, not an evaluation; evaluate its model with "
        f"`srl eval run {run} --data FILE`, and compare that run"
    )


def compare(runs: Sequence[Evaluated]) -> Comparison:
    """Compare evaluations on the questions that all of them have; the first is the baseline.

    A question's value is the mean of its samples. Raises UserError where no question is in all of them, or
    one differs between them.
    """
    of_question = [run.of_question() for run in runs]
    common = sorted(set.intersection(*(set(found) for found in of_question)))
    if not common:
        raise UserError(_no_common(runs))
    _check_same(runs, common)
    samples = [{name: found[name] for name in common} for found in of_question]
    groups = _by_source(samples[0]) | _answerable_by_all(runs, common)
    measured = _corrected(_measure(samples, groups))
    left_out = [len(found) - len(common) for found in of_question]
    notes = [*_run_notes(runs, samples), *_document_notes(samples[0], groups)]
    return Comparison(runs, len(common), left_out, measured, notes)


def name_of(run: int) -> str:
    """The letter by which a table names a run: A for the first."""
    return chr(ord("A") + run)


def _no_common(runs: Sequence[Evaluated]) -> str:
    sources = (
        f"{name_of(number)} asks {', '.join(sorted({result.data_source for result in run.results}))}"
        for number, run in enumerate(runs)
    )
    return f"no question is in all of these runs: {'; '.join(sources)}; evaluate them on the same --data"


def _check_same(runs: Sequence[Evaluated], common: Sequence[str]) -> None:
    """Raise UserError where a question has another source, text or answers in another run."""
    for number, run in enumerate(runs[1:], 1):
        for name in common:
            before, now = runs[0].asked[name], run.asked[name]
            if before != now:
                differ = zip(_ASKED, before, now, strict=True)
                what, one, other = next(each for each in differ if each[1] != each[2])
                raise UserError(
                    f"question {name} has another {what} in {name_of(number)} than in A: {_short(other)} and "
                    f"{_short(one)}; evaluate both on the same --data"
                )


_ASKED = ("data source", "text", "list of golden answers")


def _short(value: object, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[:width]}…"


Samples = Mapping[str, Sequence[EpisodeResult]]
"""The samples of each question."""


Groups = Mapping[str, Sequence[str]]
"""The questions of each source, and of what stands in the place of one."""


def _measure(samples: Sequence[Samples], groups: Groups) -> list[Measured]:
    """Every measure of every run on each group of questions."""
    measured = []
    for source, names in groups.items():
        documents = [samples[0][name][0].cluster for name in names]
        for measure, field in MEASURES.items():
            values = [
                [fmean(getattr(sample, field) for sample in found[name]) for name in names]
                for found in samples
            ]
            for run, own in enumerate(values):
                test = paired_test(values[0], own, documents) if run else None
                held = interval(own, documents)
                measured.append(Measured(source, len(names), measure, run, fmean(own), held, test))
    return measured


def _by_source(samples: Samples) -> dict[str, list[str]]:
    """The questions of each source, and of all where there are several."""
    sources = defaultdict(list)
    for name, found in samples.items():
        sources[found[0].data_source].append(name)
    several = {ALL: list(samples)} if len(sources) > 1 else {}
    return {name: sources[name] for name in sorted(sources)} | several


def _answerable_by_all(runs: Sequence[Evaluated], common: Sequence[str]) -> dict[str, list[str]]:
    """The questions that every corpus whose coverage is known can answer; none if that is all, or unknown."""
    known = [run.answerable for run in runs if run.answerable is not None]
    names = [name for name in common if known and all(name in answerable for answerable in known)]
    return {ANSWERABLE: names} if 0 < len(names) < len(common) else {}


def _corrected(measured: Sequence[Measured]) -> list[Measured]:
    """The same with p-values corrected for the number of tests."""
    ps = iter(holm([row.test.p for row in measured if row.test]))
    return [replace(row, p=next(ps)) if row.test else row for row in measured]


def _run_notes(runs: Sequence[Evaluated], samples: Sequence[Samples]) -> list[str]:
    """What a reader of the table has to know about the runs."""
    notes = []
    for number, (run, found) in enumerate(zip(runs, samples, strict=True)):
        if run.status != "finished":
            notes.append(f"{name_of(number)} is {run.status}: the table has the questions that it has so far")
        failed = sum(not sample.valid for each in found.values() for sample in each)
        if failed:
            notes.append(f"{name_of(number)}: {failed:,} episodes were lost to faults and count 0")
    pairs = combinations(((name_of(number), run) for number, run in enumerate(runs)), 2)
    for (one, first), (other, second) in pairs:
        digests = first.index_digest, second.index_digest
        if all(digests) and digests[0] != digests[1]:
            notes.append(f"{one} and {other} searched different indexes: {digests[0]:.12}, {digests[1]:.12}")
    return notes


def _document_notes(samples: Samples, groups: Groups) -> list[str]:
    """The groups whose questions come from too few documents for an interval."""
    notes = []
    for source, names in groups.items():
        found = ClusterSums.of([0.0] * len(names), [samples[name][0].cluster for name in names])
        if not found.independent and found.effective < MIN_CLUSTERS:
            notes.append(
                f"{source} has no intervals: its questions come from {len(found.sizes):,} documents, which "
                f"count as {found.effective:.1f} of equal size; an interval needs {MIN_CLUSTERS}"
            )
    return notes


def as_records(found: Comparison) -> list[dict[str, Any]]:
    """The rows with plain values, for programs: one record per source, measure and run."""
    return [
        {
            "source": row.source, "questions": row.questions, "measure": row.measure,
            "run": found.runs[row.run].run, "model": found.runs[row.run].model,
            "setting": found.runs[row.run].setting, "value": row.value, **_bounds("", row.interval),
            "difference": row.test.difference if row.test else None,
            **_bounds("difference_", row.test.interval if row.test else None),
            "p": row.test.p if row.test else None, "p_corrected": row.p, "significant": row.significant,
        }
        for row in found.rows
    ]  # fmt: skip


def _bounds(prefix: str, held: Interval | None) -> dict[str, float | None]:
    low, high = held or (None, None)
    return {f"{prefix}low": low, f"{prefix}high": high}
