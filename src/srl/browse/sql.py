"""Questions in SQL that only read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.errors import UserError
from srl.store import TABLES, in_one_line

_READS = ("SELECT", "EXPLAIN", "MULTI")  # MULTI is PIVOT, which makes a type of its values first
_TABLES = ", ".join(table.name for table in TABLES)
_EXPLAIN = re.compile(r"\s*explain(\s+analyze)?(\s*\([^)]*\))?\s", re.IGNORECASE)


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


def sql(connection: duckdb.DuckDBPyConnection, query: str) -> Answer:
    """The answer to one query that reads. Raises UserError with DuckDB's message, on one line."""
    try:
        _check(connection, query)
        cursor = connection.execute(query)
        columns = _distinct([column[0] for column in cursor.description or ()])
        return Answer(columns, tuple(cursor.fetchall()))
    except duckdb.IOException:  # perhaps the log was compacted meanwhile: `srl.store.reading` asks again
        raise
    except duckdb.CatalogException as error:
        raise UserError(f"{in_one_line(error)} The tables are {_TABLES}.") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Names of columns, a second `a` as `a_1`, so that none hides another."""
    distinct: list[str] = []
    for name in names:
        seen = sum(other == name for other in names[: len(distinct)])
        distinct.append(f"{name}_{seen}" if seen else name)
    return tuple(distinct)


def _check(connection: duckdb.DuckDBPyConnection, query: str) -> None:
    found = connection.extract_statements(query)
    if len(found) != 1:
        raise UserError(f"expected one query, found {len(found)}; give one at a time")
    kind = found[0].type.name
    if kind not in _READS:
        raise UserError(f"only queries that read are answered here, not {kind}; begin with SELECT or FROM")
    if kind == "EXPLAIN":
        _check(connection, _explained(query))


def _explained(query: str) -> str:
    match = _EXPLAIN.match(query)
    if match is None:
        raise UserError("expected EXPLAIN at the very beginning of the query")
    return query[match.end() :]
