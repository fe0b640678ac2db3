"""Two runs, or two steps, on the questions that both answered: what flipped, and which queries changed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from srl.errors import UserError
from srl.evaluate.comparison import Measured, groups, measured
from srl.evaluate.intervals import Interval, interval
from srl.evaluate.question_sets import MEASURES
from srl.evaluate.retrieval_metrics import document_of
from srl.store import rows
from srl.workspace import split_at_step

PHASES = ("eval", "val", "test", "train", "sft")
"""Which phase is compared if none is named: the first that both sides have."""

Question = dict[str, Any]
"""A question on one side: its text, the mean EM of its samples, all they asked, and the first of them."""


@dataclass(frozen=True, slots=True)
class Side:
    """One step of one phase of a run."""

    run_id: str
    phase: str
    step: int


@dataclass(frozen=True, slots=True)
class Diff:
    """Side B beside side A on their common questions.

    `rows` has the exact match of A and of B for each data set, and for all if there are several. `changes`
    has a row for each question on which the mean EM of its samples or the queries differ, the largest fall
    first. `worse` and `better` count questions, with the interval of their share (None: too few independent
    questions).
    """

    a: Side
    b: Side
    only_a: int
    only_b: int
    questions: int
    rows: list[tuple[Measured, Measured]]
    worse: tuple[int, Interval | None]
    better: tuple[int, Interval | None]
    other_queries: int
    changes: list[dict[str, Any]]


def read_side(text: str) -> tuple[str, int | None]:
    """The run and the step that `RUN` or `RUN@STEP` names. Raises UserError."""
    run, step = split_at_step(text)
    if step is None:
        return run, None
    if not (step.isascii() and step.isdigit()):
        raise UserError(f"{text}: expected RUN or RUN@STEP, such as last@30")
    return run or "last", int(step)


def run_of(connection: duckdb.DuckDBPyConnection, run: Path) -> str:
    """The `run_id` in the log of the directory `run`. Raises UserError unless it is one run."""
    for row in rows(connection, "SELECT run_id, path FROM runs"):
        if Path(row["path"]).resolve() in (run.resolve(), (run / "log").resolve()):
            return str(row["run_id"])
    raise UserError(f"{run}: expected one run whose log can be read", hint="`srl inspect runs` lists them")


def sides(
    connection: duckdb.DuckDBPyConnection,
    pairs: Sequence[tuple[str, int | None]],
    phase: str | None = None,
) -> tuple[Side, Side]:
    """What two pairs of run_id and step stand for; without a step, the last one of the phase.

    Raises UserError if the two have no phase in common, and if they are the same.
    """
    query = "SELECT DISTINCT phase, step FROM raw.trajectories WHERE run_id = ? ORDER BY phase, step"
    all_places = [connection.execute(query, [run_id]).fetchall() for run_id, _ in pairs]
    for (run_id, step), places in zip(pairs, all_places, strict=True):
        if step is not None and all(step != at for _, at in places):
            raise UserError(f"{run_id} has no episodes of step {step}")
    for common in PHASES if phase is None else (phase,):
        pair = [
            Side(run_id, common, max(steps))
            for (run_id, step), places in zip(pairs, all_places, strict=True)
            if (steps := [at for name, at in places if name == common and step in (None, at)])
        ]
        if len(pair) == 2:
            if pair[0] == pair[1]:
                raise UserError(f"both are {common} step {pair[0].step} of {pair[0].run_id}", hint="name two")
            return pair[0], pair[1]
    hint = "`srl inspect trajectories` lists the steps of a run"
    raise UserError(f"there is no {phase or 'phase'} that both have at these steps", key="--phase", hint=hint)


def diff(connection: duckdb.DuckDBPyConnection, a: Side, b: Side) -> Diff:
    """Compare B with A. Raises UserError if they have no question with golden answers in common."""
    left, right = _questions(connection, a), _questions(connection, b)
    pairs = [(left[key], right[key]) for key in left if key in right]
    if not pairs:
        raise UserError(
            "both sides have no question with golden answers in common; training steps ask different ones",
            hint="compare validations: --phase val",
        )
    clusters = [before["cluster"] for before, _ in pairs]
    worse, better = ([sign * (after["em"] - before["em"]) > 0 for before, after in pairs] for sign in (-1, 1))
    changes = [
        _change(*pair) for pair in pairs if any(pair[0][name] != pair[1][name] for name in ("em", "asks"))
    ]
    by_id = {before["id"]: (before, after) for before, after in pairs}
    parts = groups({name: before["data_source"] for name, (before, _) in by_id.items()})
    return Diff(
        a, b, len(left) - len(pairs), len(right) - len(pairs), len(pairs),
        [_row(source, [by_id[name] for name in names]) for source, names in parts.items()],
        (sum(worse), interval([float(flag) for flag in worse], clusters)),
        (sum(better), interval([float(flag) for flag in better], clusters)),
        sum(before["asks"] != after["asks"] for before, after in pairs),
        sorted(changes, key=lambda row: (row["em_b"] - row["em_a"] or 2, row["question_id"])),
    )  # fmt: skip


_SAMPLES = """
SELECT question_id, question, golden_answers, data_source, metadata, sample, id, em, valid, answer, verdict,
    coalesce(queries, []) AS queries
FROM trajectories LEFT JOIN (
    SELECT trajectory_id AS id, list(query ORDER BY position) AS queries
    FROM searches WHERE run_id = $run AND phase = $phase AND step = $step GROUP BY trajectory_id
) USING (id)
WHERE run_id = $run AND phase = $phase AND step = $step AND em IS NOT NULL ORDER BY sample, position
"""


def _questions(connection: duckdb.DuckDBPyConnection, side: Side) -> dict[tuple[str, str], Question]:
    """The questions of a side by id and text. A failed episode counts as wrong, as in `srl eval`."""
    samples: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows(connection, _SAMPLES, {"run": side.run_id, "phase": side.phase, "step": side.step}):
        samples[row["question_id"], row["question"]].append(row)
    return {
        key: group[0] | {
            "em": float(sum(row["em"] * row["valid"] for row in group)) / len(group), "samples": len(group),
            "asks": {" ".join(query.lower().split()) for row in group for query in row["queries"]},
            "cluster": document_of(json.loads(group[0]["metadata"])) or (group[0]["question_id"],),
        }
        for key, group in samples.items()
    }  # fmt: skip


def _row(source: str, pairs: Sequence[tuple[Question, Question]]) -> tuple[Measured, Measured]:
    values = {side: [pair[place]["em"] for pair in pairs] for place, side in enumerate("AB")}
    a, b = measured(source, MEASURES["em"], values, [before["cluster"] for before, _ in pairs])
    return a, b


def _change(before: Question, after: Question) -> dict[str, Any]:
    """A row: the question, what changed, and of both sides EM, first answer, verdict, queries and id."""
    row = {name: before[name] for name in ("question_id", "question", "data_source", "golden_answers")}
    row |= {"change": _kind(before["em"], after["em"]), "queries_changed": before["asks"] != after["asks"]}
    for letter, side in (("a", before), ("b", after)):
        names = ("em", "samples", "answer", "verdict", "queries", "id")
        row |= {f"{name}_{letter}": side[name] for name in names}
    return row


def _kind(before: float, after: float) -> str:
    if before == after:
        return "same"
    if {before, after} == {0.0, 1.0}:
        return "wrong→right" if after else "right→wrong"
    return "better" if after > before else "worse"
