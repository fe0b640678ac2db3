"""Which trajectories are listed: filters, conditions in SQL, and counts of what a filter could be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, get_args

import duckdb

from srl.browse.sql import expression
from srl.errors import UserError, nearest, parsing
from srl.store.database import quoted
from srl.store.verdict import VERDICTS
from srl.trajectory import EndReason

Condition = tuple[str, list[object]]
"""An SQL condition on `trajectories`, and its parameters."""
EVERY: Condition = ("true", [])

FACETS = {"phase": "phase", "verdict": "verdict", "end": "end", "source": "data_source", "hops": "hops"}
"""The fields of `Filter` whose values are counted, each with its column."""

_BOUND = re.compile(r"(<=|>=|<|>|=)?\s*(-?(?:\d+(?:\.\d*)?|\.\d+))")


@dataclass(frozen=True, slots=True)
class Filter:
    """Which trajectories to list; None means no condition.

    `steps` is `30`, `10:20`, `10:` or `:20`, ends included; `em`, `reward` and `searches` are a number, or
    one after `<`, `<=`, `>` or `>=`. `contains` searches, ignoring case, in the question, all segments and
    queries.
    """

    steps: str | None = None
    phase: str | None = None
    source: str | None = None
    hops: int | None = None
    question: str | None = None
    em: str | None = None
    reward: str | None = None
    searches: str | None = None
    end: str | None = None
    verdict: str | None = None
    contains: str | None = None

    def where(self) -> Condition:
        """The filter as an SQL condition on `trajectories`, and its parameters. Raises UserError."""
        pairs = list(self._conditions())
        parameters = [value for _, values in pairs for value in values]
        return " AND ".join(sql for sql, _ in pairs) or "true", parameters

    def _conditions(self) -> Iterator[Condition]:
        equal = {
            "phase": self.phase, "data_source": self.source, "hops": self.hops, "question_id": self.question,
            '"end"': _one_of("end", self.end, get_args(EndReason)),
            "verdict": _one_of("verdict", self.verdict, tuple(VERDICTS)),
        }  # fmt: skip
        for column, value in equal.items():
            if value is not None:
                yield f"{column} = ?", [value]
        for column in ("em", "reward", "searches"):
            if (bound := getattr(self, column)) is not None:
                operator, limit = _bound(column, bound)
                yield f"{column} {operator} ?", [limit]
        if self.steps is not None:
            yield "step BETWEEN ? AND ?", list(span(self.steps))
        if self.contains is not None:
            yield _CONTAINS, [self.contains] * 3


def condition(text: str | None) -> Condition:
    """What a user typed after `--where`, an SQL expression over the columns of `trajectories`; None: all.

    DuckDB's table function `query` takes one SELECT and nothing that writes, so the text can do no more.
    """
    if text is None:
        return EVERY
    query = quoted(f"SELECT run_id, step, id FROM trajectories WHERE {expression(text, '--where')}")
    return f"(run_id, step, id) IN (FROM query({query}))", []


@dataclass(frozen=True, slots=True)
class Facets:
    """How many trajectories match, and how many would with each value of one condition.

    `counts[name]` has (value, count) in falling order of count. A value is counted under all conditions but
    its own, so that another value can be chosen instead. None stands for rows without a value.
    """

    total: int
    counts: dict[str, list[tuple[Any, int]]]


def facets(connection: duckdb.DuckDBPyConnection, filters: Filter) -> Facets:
    """Counts of what matches `filters`, by one query over the log."""
    filters.where()  # refuses an unknown verdict or end, which the query below does not have
    where, parameters = replace(filters, **dict.fromkeys(FACETS)).where()
    columns = ", ".join(f'"{column}"' for column in FACETS.values())
    query = f"SELECT {columns}, count(*) FROM trajectories WHERE {where} GROUP BY ALL"
    conditions = {place: getattr(filters, name) for place, name in enumerate(FACETS)}
    total, counts = 0, [Counter[Any]() for _ in FACETS]
    for *values, count in connection.execute(query, parameters).fetchall():
        misses = [place for place, want in conditions.items() if want is not None and values[place] != want]
        total += 0 if misses else count
        for place in conditions:
            if misses in ([], [place]):
                counts[place][values[place]] += count
    facet_counts = [sorted(counter.items(), key=lambda pair: (-pair[1], str(pair[0]))) for counter in counts]
    return Facets(total, dict(zip(FACETS, facet_counts, strict=True)))


_CONTAINS = """(
    contains(lower(question), lower(?))
    OR (run_id, id) IN (SELECT run_id, trajectory_id FROM segments WHERE contains(lower(text), lower(?)))
    OR (run_id, id) IN (SELECT run_id, trajectory_id FROM searches WHERE contains(lower(query), lower(?)))
)"""


def _one_of(name: str, value: str | None, choices: tuple[str, ...]) -> str | None:
    """`value`, which must be None or one of `choices`. Raises UserError."""
    if value is not None and value not in choices:
        what = f"no {name} {value!r}: there are {', '.join(choices)}{nearest(value, choices)}"
        raise UserError(what, key=f"--{name}")
    return value


def _bound(name: str, text: str) -> tuple[str, float]:
    match = _BOUND.fullmatch(text.strip())
    if match is None:
        raise UserError(
            f"--{name} {text}: expected a number such as 0, or a bound such as '<1'", key=f"--{name}"
        )
    return match[1] or "=", float(match[2])


def span(text: str) -> tuple[int, int]:
    """The first and the last step of `30`, `10:20`, `10:` or `:20`. Raises UserError."""
    match = re.fullmatch(r"(\d+)|(\d*):(\d*)", text.strip())
    if match is None:
        what = f"--steps {text}: expected a step such as 30, or a range such as 10:20"
        raise UserError(what, key="--steps")
    with parsing("--steps"):
        first, last = (match[1], match[1]) if match[1] else (match[2] or 0, match[3] or 2**31 - 1)
        steps = int(first), int(last)
    if steps[0] > steps[1]:
        raise UserError(f"--steps {text}: the first step is after the last", key="--steps")
    return steps
