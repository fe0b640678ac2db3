"""Listings of trajectories: their columns, a whole one, or a page of it.

A page begins after (or ends before) a row, not at an offset: the conditions on the sorted column let DuckDB
keep the first rows only, whatever the size of the log, and a step that is written meanwhile shifts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.browse.filters import EVERY, Condition
from srl.errors import UserError, nearest, parsing
from srl.store import rows

COLUMNS = {
    "id": "id", "run_id": "", "step": "step", "phase": "phase", "position": "", "sample": "",
    "question_id": "", "data_source": "source", "hops": "hops", "em": "em", "f1": "", "reward": "reward",
    "searches": "searches", "turns": "", "tokens": "", "end": "", "gold_in_passages": "",
    "verdict": "verdict", "answer": "answer", "golden_answers": "gold", "question": "question",
}  # fmt: skip
"""The columns of `trajectories` that a listing has, in its order; one with a heading is in tables and on the
page too, the others in JSON."""

TEXTS = ("id", "run_id", "answer", "golden_answers", "question")
"""The columns that a listing is not sorted by."""

SORTS = tuple(name for name in COLUMNS if name not in TEXTS)
"""The columns that listings can be sorted by, `-` before one for descending order."""

HEADINGS = {name: heading for name, heading in COLUMNS.items() if heading}
"""The columns of a table, each with its heading."""

_TIES = ("step", "phase", "position", "run_id", "id")
"""What orders rows with equal values; together unique."""


@dataclass(frozen=True, slots=True)
class Page:
    """Rows with `COLUMNS`, and the cursors of the pages `before` and `after`, None at the ends."""

    rows: list[dict[str, Any]]
    before: str | None
    after: str | None


def page(
    connection: duckdb.DuckDBPyConnection,
    condition: Condition = EVERY,
    sort: str = "-step",
    size: int | None = 50,
    *,
    after: str | None = None,
    before: str | None = None,
) -> Page:
    """The `size` rows that match `condition` and follow the cursor `after`, precede `before`, or are first.

    All rows where `size` is None. `sort` is one of `SORTS`, with `-` before it for descending order; rows
    without a value are last. Raises UserError for another column, and for a cursor of another `sort`.
    """
    column, descending = _column(sort)
    backwards = before is not None
    cursor = before if backwards else after
    where, parameters = condition
    if cursor is not None:
        beyond, values = _beyond(column, descending, backwards, _read_cursor(cursor))
        where, parameters = f"({where}) AND ({beyond})", [*parameters, *values]
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    count = "" if size is None else f"LIMIT {size + 1}"
    order = _order(column, descending, backwards)
    query = f"SELECT {names} FROM trajectories WHERE {where} ORDER BY {order} {count}"
    table = rows(connection, query, parameters)
    has_more, table = size is not None and len(table) > size, table[:size]
    if backwards:
        table.reverse()
    first, last = (_cursor(table[at], column) if table else None for at in (0, -1))
    return Page(
        table,
        first if (has_more if backwards else after is not None) else None,
        last if backwards or has_more else None,
    )


def neighbours(
    connection: duckdb.DuckDBPyConnection, condition: Condition, sort: str, row: dict[str, Any]
) -> tuple[str | None, str | None]:
    """The ids before and after the trajectory `row` in the listing of `condition`, None at its ends."""
    cursor = _cursor(row, _column(sort)[0])
    previous = page(connection, condition, sort, 1, before=cursor).rows
    following = page(connection, condition, sort, 1, after=cursor).rows
    return (previous[0]["id"] if previous else None), (following[0]["id"] if following else None)


def _column(sort: str) -> tuple[str, bool]:
    """The column and whether it descends."""
    column = sort.removeprefix("-")
    if column not in SORTS:
        what = f"no listing is sorted by {column!r}: there are {', '.join(SORTS)}{nearest(column, SORTS)}"
        raise UserError(what, key="--sort")
    return column, sort.startswith("-")


def _order(column: str, descending: bool, backwards: bool = False) -> str:
    """The order of a listing, or the same from its end: there missing values come first."""
    way = "DESC" if descending != backwards else "ASC"
    nulls = "FIRST" if backwards else "LAST"
    ties = ", ".join(f'"{name}" {"DESC" if backwards else "ASC"}' for name in _TIES)
    return f'"{column}" {way} NULLS {nulls}, {ties}'


def _beyond(column: str, descending: bool, backwards: bool, cursor: Sequence[Any]) -> Condition:
    """The condition on rows after the cursor's row, or `backwards` before it, and its parameters."""
    value, *ties = cursor
    tie = f"({', '.join(_TIES)}) {'<' if backwards else '>'} ({', '.join('?' * len(_TIES))})"
    further = "<" if descending != backwards else ">"
    if value is None:
        with_value = f' OR "{column}" IS NOT NULL' if backwards else ""
        return f'("{column}" IS NULL AND {tie}){with_value}', list(ties)
    without = "" if backwards else f' OR "{column}" IS NULL'
    return f'"{column}" {further} ? OR ("{column}" = ? AND {tie}){without}', [value, value, *ties]


def _cursor(row: dict[str, Any], column: str) -> str:
    return json.dumps([row[name] for name in (column, *_TIES)], ensure_ascii=False)


def _read_cursor(text: str) -> list[Any]:
    """The values of a cursor. Raises UserError."""
    with parsing("the beginning of the page"):
        value, *ties = json.loads(text)
    if [type(tie) for tie in ties] != [int, str, int, str, str] or isinstance(value, list | dict | bool):
        raise UserError(f"no page begins at {text!r}; open the listing from its beginning")
    return [value, *ties]
