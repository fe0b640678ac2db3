"""Which trajectories to list, and the columns of a listing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from srl.errors import UserError, nearest, parsing
from srl.store.verdict import VERDICTS
from srl.trajectory import EndReason

COLUMNS = {
    "id": "id", "run_id": "", "step": "step", "phase": "phase", "position": "", "sample": "",
    "question_id": "", "data_source": "source", "hops": "hops", "em": "em", "f1": "", "reward": "reward",
    "searches": "searches", "turns": "", "tokens": "", "end": "", "gold_in_passages": "",
    "verdict": "verdict", "answer": "answer", "golden_answers": "gold", "question": "question",
}  # fmt: skip
"""The columns of a listing in JSON, in this order; those with a heading are in tables and on the page too.

A new column of the table `trajectories` is listed everywhere once it is named here.
"""

TEXTS = ("id", "run_id", "answer", "golden_answers", "question")
"""The columns that a page is not sorted by."""

HEADINGS = {name: heading for name, heading in COLUMNS.items() if heading}
"""The columns of a table, each with its heading."""

_BOUND = re.compile(r"(<=|>=|<|>|=)?\s*(-?\d+(?:\.\d+)?)")


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

    def where(self) -> tuple[str, list[object]]:
        """The filter as an SQL condition on `trajectories`, and its parameters. Raises UserError."""
        pairs = list(self._conditions())
        parameters = [value for _, values in pairs for value in values]
        return " AND ".join(sql for sql, _ in pairs) or "true", parameters

    def _conditions(self) -> Iterator[tuple[str, list[object]]]:
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
        return int(first), int(last)
