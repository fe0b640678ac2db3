"""Two runs, or two steps, on the questions that both answered: what flipped, and which queries changed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from srl.errors import UserError
from srl.evaluate.intervals import Interval, interval
from srl.evaluate.paired_tests import PairedTest, paired_test
from srl.evaluate.retrieval_metrics import document_of
from srl.store import rows
from srl.workspace import split_at_step

PHASES = ("eval", "val", "test", "train", "sft")
"""Which phase is compared if none is named: the first that both sides have."""


@dataclass(frozen=True, slots=True)
class Side:
    """One step of one phase of a run."""

    run_id: str
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class SetDiff:
    """The common questions of some data sets: how many, the mean EM of both sides, and the test of B - A.

    The test has no interval where the questions of a set come from too few documents.
    """

    data_sources: tuple[str, ...]
    questions: int
    em_a: float
    em_b: float
    test: PairedTest


@dataclass(frozen=True, slots=True)
class Diff:
    """Side B beside side A on their common questions.

    `em_a` and `em_b` are means over questions, `test` is that of B - A. `changes` has a row for each question
    on which the mean EM of its samples or the queries differ, the largest fall first. `worse` and `better`
    count questions, with the interval of their share (None: too few independent questions). `sets` has each
    data set, and then those with an interval together, if only some have one.
    """

    a: Side
    b: Side
    questions: int
    only_a: int
    only_b: int
    em_a: float
    em_b: float
    test: PairedTest
    worse: tuple[int, Interval | None]
    better: tuple[int, Interval | None]
    other_queries: int
    changes: list[dict[str, Any]]
    sets: list[SetDiff]

    @property
    def single(self) -> bool:
        """Whether each question has one sample, so that every change of EM is a flip."""
        return all(row["em_a"] in (0, 1) and row["em_b"] in (0, 1) for row in self.changes)


def read_side(text: str) -> tuple[str, int | None]:
    """The run and the step that `RUN` or `RUN@STEP` names. Raises UserError."""
    run, step = split_at_step(text)
    if step is None:
        return run, None
    if not (step.isascii() and step.isdigit()):
        raise UserError(f"{text}: expected RUN or RUN@STEP, such as last@30")
    return run or "last", int(step)


def run_of(connection: duckdb.DuckDBPyConnection, run: Path) -> str:
    """The `run_id` in the log of the directory `run`. Raises UserError if its log was not read, and for a
    folder of runs."""
    found = rows(connection, "SELECT run_id, path FROM runs")
    for row in found:
        if Path(row["path"]).resolve() in (run.resolve(), (run / "log").resolve()):
            return str(row["run_id"])
    if any(Path(row["path"]).resolve().is_relative_to(run.resolve()) for row in found):
        raise UserError(f"{run.name} is a folder of runs, expected one run; `srl inspect runs` lists them")
    raise UserError(f"the log of {run.name} cannot be read")


def sides(
    connection: duckdb.DuckDBPyConnection,
    asked: Sequence[tuple[str, int | None]],
    phase: str | None = None,
) -> tuple[Side, Side]:
    """What two pairs of run_id and step stand for; without a step, the last one of the phase, not pruned.

    Raises UserError if the two have no phase in common, and if they are the same.
    """
    query = "SELECT DISTINCT phase, step FROM raw.trajectories WHERE run_id = ?"
    had = [connection.execute(query, [run_id]).fetchall() for run_id, _ in asked]
    for wanted in PHASES if phase is None else (phase,):
        found = []
        for (run_id, step), pairs in zip(asked, had, strict=True):
            steps = [at for of, at in pairs if of == wanted and step in (None, at)]
            if steps:
                found.append(Side(run_id, wanted, max(steps)))
        if len(found) == 2:
            if found[0] == found[1]:
                raise UserError(f"both are {wanted} step {found[0].step} of {found[0].run_id}; name two")
            return found[0], found[1]
    raise UserError("; ".join(_has(*one, pairs, phase) for one, pairs in zip(asked, had, strict=True)))


def _has(run_id: str, step: int | None, pairs: Sequence[tuple[str, int]], phase: str | None) -> str:
    """What a side has, for the message that it does not fit the other."""
    steps: dict[str, list[int]] = defaultdict(list)
    for of, at in sorted(pairs):
        steps[of].append(at)
    listed = ", ".join(f"{of} steps {_span(found)}" for of, found in steps.items()) or "no trajectories"
    asked = f"no {phase or 'common phase'}" + (f" at step {step}" if step is not None else "")
    return f"{run_id}: {asked}; it has {listed}"


def _span(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, … {steps[-1]}"


def diff(connection: duckdb.DuckDBPyConnection, a: Side, b: Side) -> Diff:
    """Compare B with A. Raises UserError if they have no question with golden answers in common."""
    left, right = _questions(connection, a), _questions(connection, b)
    common = [key for key in left if key in right]
    if not common:
        raise UserError(
            f"{_named(a)} and {_named(b)} have no question with golden answers in common; training steps ask "
            "different ones, so compare validations: --phase val"
        )
    pairs = [(left[key], right[key]) for key in common]
    clusters, before, after = _values(pairs)
    whole = _set_diff(pairs)
    changes = [_change(*pair) for pair in pairs if pair[0].em != pair[1].em or pair[0].asks != pair[1].asks]

    def counted(fits: Callable[[float, float], bool]) -> tuple[int, Interval | None]:
        hits = [float(fits(*pair)) for pair in zip(before, after, strict=True)]
        return int(sum(hits)), interval(hits, clusters)

    return Diff(
        a, b, len(common), len(left) - len(common), len(right) - len(common),
        whole.em_a, whole.em_b, whole.test,
        counted(lambda one, other: other < one), counted(lambda one, other: other > one),
        sum(one.asks != other.asks for one, other in pairs),
        sorted(changes, key=lambda row: (row["em_b"] - row["em_a"] or 2, row["question_id"])), _sets(pairs),
    )  # fmt: skip


_Pair = tuple["_Question", "_Question"]
"""A question on both sides."""


def _values(pairs: Sequence[_Pair]) -> tuple[list[Hashable], list[float], list[float]]:
    """Of each question its document, and the EM of A and of B."""
    return [one.cluster for one, _ in pairs], [one.em for one, _ in pairs], [other.em for _, other in pairs]


def _set_diff(pairs: Sequence[_Pair]) -> SetDiff:
    clusters, before, after = _values(pairs)
    test = paired_test(before, after, clusters)
    return SetDiff(
        tuple(sorted({one.data_source for one, _ in pairs})), len(pairs),
        sum(before) / len(pairs), sum(after) / len(pairs), test,
    )  # fmt: skip


def _sets(pairs: Sequence[_Pair]) -> list[SetDiff]:
    """Each data set by itself, and those with an interval together if others have none."""
    by_source: dict[str, list[_Pair]] = defaultdict(list)
    for pair in pairs:
        by_source[pair[0].data_source].append(pair)
    found = [_set_diff(by_source[name]) for name in sorted(by_source)]
    sure = [name for one in found if one.test.interval for name in one.data_sources]
    if 1 < len(sure) < len(found):
        found.append(_set_diff([pair for name in sure for pair in by_source[name]]))
    return found


def _named(side: Side) -> str:
    return f"{side.phase} step {side.step} of {side.run_id}"


@dataclass(slots=True)
class _Question:
    """The samples of one question on one side, in their order."""

    rows: list[dict[str, Any]]

    @property
    def em(self) -> float:
        """The mean EM; a failed episode counts as wrong, as in `srl eval`."""
        return float(sum(row["em"] * row["valid"] for row in self.rows)) / len(self.rows)

    @property
    def asks(self) -> set[str]:
        """The queries of all samples, without differences of case and spaces."""
        return {" ".join(query.lower().split()) for row in self.rows for query in row["queries"]}

    @property
    def data_source(self) -> str:
        return str(self.rows[0]["data_source"])

    @property
    def cluster(self) -> Hashable:
        first = self.rows[0]
        return document_of(json.loads(first["metadata"])) or (first["question_id"],)


_SAMPLES = """
SELECT question_id, question, golden_answers, data_source, metadata, sample, id, em, valid, answer, verdict,
    coalesce(queries, []) AS queries
FROM trajectories LEFT JOIN (
    SELECT trajectory_id AS id, list(query ORDER BY position) AS queries
    FROM searches WHERE run_id = $run AND phase = $phase AND step = $step GROUP BY trajectory_id
) USING (id)
WHERE run_id = $run AND phase = $phase AND step = $step AND em IS NOT NULL ORDER BY position, sample
"""


def _questions(connection: duckdb.DuckDBPyConnection, side: Side) -> dict[tuple[str, str], _Question]:
    """The questions of a side by id and text."""
    given = {"run": side.run_id, "phase": side.phase, "step": side.step}
    found: dict[tuple[str, str], _Question] = {}
    for row in rows(connection, _SAMPLES, given):
        found.setdefault((row["question_id"], row["question"]), _Question([])).rows.append(row)
    for question in found.values():
        question.rows.sort(key=lambda row: row["sample"])
    return found


def _change(one: _Question, other: _Question) -> dict[str, Any]:
    """A row: the question, what changed, and of both sides EM, first answer, verdict, queries and id."""
    first = one.rows[0]
    row = {name: first[name] for name in ("question_id", "question", "data_source", "golden_answers")}
    row |= {"change": _kind(one.em, other.em), "queries_changed": one.asks != other.asks}
    for letter, found in (("a", one), ("b", other)):
        shown: Mapping[str, Any] = found.rows[0]
        row |= {f"em_{letter}": found.em, f"samples_{letter}": len(found.rows)}
        row |= {f"{name}_{letter}": shown[name] for name in ("answer", "verdict", "queries", "id")}
    return row


def _kind(before: float, after: float) -> str:
    if before == after:
        return "same"
    if {before, after} == {0.0, 1.0}:
        return "wrong→right" if after else "right→wrong"
    return "better" if after > before else "worse"
