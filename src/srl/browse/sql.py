"""Questions in SQL that only read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.errors import UserError
from srl.store import TABLES, in_one_line

_READS = ("SELECT", "MULTI")  # MULTI is PIVOT, which makes a type of its values first
_TABLES = ", ".join(table.name for table in TABLES)
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(?=[a-z])", re.IGNORECASE)
_AS_TEXT = re.compile(r"TIME ZONE|INTERVAL|TIMESTAMP_NS|TIME_NS|BLOB|GEOMETRY")
"""Types of DuckDB's that Python has none for, or needs another package for; they are shown as DuckDB does."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a query gave."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @property
    def is_plan(self) -> bool:
        """Whether it is what EXPLAIN draws."""
        return self.columns == ("explain_key", "explain_value")

    def records(self) -> list[dict[str, Any]]:
        """The rows, each with its columns by name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def sql(connection: duckdb.DuckDBPyConnection, query: str, *, unsafe: bool = False) -> Answer:
    """The answer to one query that reads; `unsafe`: to whatever is asked.

    On a sealed connection (`srl.store.reading`) DuckDB opens no other files than the log's. What it would
    still write to, the log itself, is guarded here. Raises UserError with DuckDB's message, on one line.
    """
    try:
        if not unsafe:
            _check(connection, query)
        return _answer(connection.sql(query))
    except duckdb.IOException:  # perhaps the log was compacted meanwhile: `srl.store.reading` asks again
        raise
    except duckdb.CatalogException as error:
        raise UserError(f"{in_one_line(error)} The tables are {_TABLES}.") from error
    except duckdb.PermissionException as error:
        raise UserError(f"{in_one_line(error)}; add --unsafe to open other files than the log") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _answer(relation: duckdb.DuckDBPyRelation | None) -> Answer:
    """The rows of a relation; a statement without any has none."""
    if relation is None:
        return Answer((), ())
    shown = [
        f"CAST(#{place} AS VARCHAR)" if _AS_TEXT.search(str(kind)) else f"#{place}"
        for place, kind in enumerate(relation.types, start=1)
    ]
    rows = relation.project(", ".join(shown)).fetchall()
    return Answer(_distinct(relation.columns), tuple(rows))


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of columns, a second `a` as `a_1`, so that none hides another."""
    distinct: list[str] = []
    for name in names:
        seen = sum(other == name for other in names[: len(distinct)])
        distinct.append(f"{name}_{seen}" if seen else name)
    return tuple(distinct)


def _check(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    """Raise UserError for anything but one query that reads, or EXPLAIN of one.

    What EXPLAIN explains is checked as a query of its own. It begins with a word, so DuckDB reads it the
    same way there and here.
    """
    explain = _EXPLAIN.match(query)
    found = connection.extract_statements(query[explain.end() :] if explain else query)
    if len(found) != 1:
        raise UserError(f"expected one query, found {len(found)}; give one at a time")
    kind = found[0].type.name
    if kind == "EXPLAIN":
        raise UserError("expected EXPLAIN or EXPLAIN ANALYZE right before the query, and no options")
    if kind not in _READS:
        raise UserError(
            f"only queries that read are answered here, not {kind}; "
            "begin with SELECT or FROM, or add --unsafe"
        )
