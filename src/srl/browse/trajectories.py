"""Which trajectories: conditions on them, the columns of a listing, and counts of their verdicts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import duckdb

from srl.errors import UserError, nearest, parsing
from srl.store import rows
from srl.store.verdict import VERDICTS
from srl.trajectory import EndReason

COLUMNS = (
    "id", "run_id", "step", "phase", "sample", "question_id", "data_source", "hops", "question",
    "golden_answers", "answer", "end", "em", "f1", "reward", "turns", "searches", "tokens",
    "gold_in_passages", "verdict",
)  # fmt: skip
"""The columns of a listing."""

GROUPS = ("phase", "step", "data_source", "hops", "run_id")
"""Columns by which verdicts can be counted."""

_BOUND = re.compile(r"(<=|>=|<|>|=)?\s*(-?\d+(?:\.\d+)?)")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories to list; None and False mean no condition.

    `steps` is `30`, `10:20`, `10:` or `:20`, ends included; `em` and `reward` are a number, or one after
    `<`, `<=`, `>` or `>=`. `contains` searches, ignoring case, in the question, all segments and queries.
    """

    steps: str | None = None
    phase: str | None = None
    source: str | None = None
    hops: int | None = None
    question: str | None = None
    em: str | None = None
    reward: str | None = None
    end: str | None = None
    verdict: str | None = None
    min_searches: int | None = None
    max_searches: int | None = None
    contains: str | None = None
    failed: bool = False

    def where(self) -> tuple[str, list[object]]:
        """The filter as an SQL condition on `trajectories`, and its parameters."""
        pairs = list(self._conditions())
        return " AND ".join(sql for sql, _ in pairs) or "true", [
            value for _, found in pairs for value in found
        ]

    def _conditions(self) -> Iterator[tuple[str, list[object]]]:
        equal = {"phase": self.phase, "data_source": self.source, "hops": self.hops}
        equal |= {"question_id": self.question, '"end"': self._end(), "verdict": self._verdict()}
        for column, value in equal.items():
            if value is not None:
                yield f"{column} = ?", [value]
        for column, bound in (("em", self.em), ("reward", self.reward)):
            if bound is not None:
                operator, limit = _bound(column, bound)
                yield f"{column} {operator} ?", [limit]
        for operator, count in ((">=", self.min_searches), ("<=", self.max_searches)):
            if count is not None:
                yield f"searches {operator} ?", [count]
        if self.steps is not None:
            yield "step BETWEEN ? AND ?", list(span(self.steps))
        if self.failed:
            yield "NOT valid", []
        if self.contains is not None:
            yield _CONTAINS, [self.contains] * 3

    def _verdict(self) -> str | None:
        return _one_of("verdict", self.verdict, tuple(VERDICTS))

    def _end(self) -> str | None:
        return _one_of("end", self.end, get_args(EndReason))


def _one_of(name: str, given: str | None, known: tuple[str, ...]) -> str | None:
    """`given`, which must be None or one of `known`. Raises UserError."""
    if given is not None and given not in known:
        raise UserError(f"no {name} {given!r}: there are {', '.join(known)}{nearest(given, known)}")
    return given


_CONTAINS = """(
    contains(lower(question), lower(?))
    OR (run_id, id) IN (SELECT run_id, trajectory_id FROM segments WHERE contains(lower(text), lower(?)))
    OR (run_id, id) IN (SELECT run_id, trajectory_id FROM searches WHERE contains(lower(query), lower(?)))
)"""


def _bound(name: str, text: str) -> tuple[str, float]:
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--{name} {text}: expected a number such as 0, or a bound such as '<1'")
    return match[1] or "=", float(match[2])


def span(text: str) -> tuple[int, int]:
    """The first and the last step of `30`, `10:20`, `10:` or `:20`. Raises UserError."""
    match = re.fullmatch(r"(\d+)|(\d*):(\d*)", text.strip())
    if match is None:
        raise UserError(f"--steps {text}: expected a step such as 30, or a range such as 10:20")
    with parsing("--steps"):
        first, last = (match[1], match[1]) if match[1] else (match[2] or 0, match[3] or 2**31 - 1)
        return int(first), int(last)


def verdicts(
    connection: duckdb.DuckDBPyConnection, chosen: Filter, by: str = "phase"
) -> list[dict[str, Any]]:
    """The number of trajectories with each verdict, for each value of `by`; those before training apart.

    Rows have `by`, their `steps` as in a filter, a count for each of `VERDICTS`, and `total` (trajectories
    with golden answers).
    """
    if by not in GROUPS:
        raise UserError(f"--by {by}: expected one of {', '.join(GROUPS)}{nearest(by, GROUPS)}")
    where, parameters = chosen.where()
    counts = ", ".join(f"count(*) FILTER (verdict = '{verdict}') AS \"{verdict}\"" for verdict in VERDICTS)
    query = (
        f"SELECT {by}, concat_ws(':', min(step), nullif(max(step), min(step))) AS steps, {counts}, "
        f"count(*) AS total FROM trajectories WHERE verdict IS NOT NULL AND {where} "
        f"GROUP BY {by}, step = 0 ORDER BY {by}, min(step)"
    )
    return rows(connection, query, parameters)
