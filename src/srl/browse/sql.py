"""Read-only SQL queries on the log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.errors import UserError
from srl.store import TABLES, in_one_line

_AS_TEXT = re.compile(r"TIME ZONE|INTERVAL|TIMESTAMP_NS|TIME_NS|BLOB|GEOMETRY")
"""Types of DuckDB without an equivalent in Python; they are shown as DuckDB prints them."""
_NUMBER = re.compile(r"BOOLEAN|U?(TINY|SMALL|BIG|HUGE)?INT(EGER)?|FLOAT|DOUBLE|DECIMAL.*")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a query."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def records(self) -> list[dict[str, Any]]:
        """The rows, each with its columns by name."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def sql(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    *,
    unsafe: bool = False,
    limit: int | None = None,
    cell: int | None = None,
) -> Answer:
    """The result of one query that only reads, or of any query if `unsafe`; at most `limit` rows. With
    `cell` all but numbers are texts, of at most so many characters.

    On a sealed connection (`srl.store.reading`) DuckDB opens no files but the log's, and the query cannot
    write. Raises UserError with DuckDB's message, on one line.
    """
    try:
        relation = connection.sql(query) if unsafe else _reading(connection, query)
        if relation is None:  # a statement without rows
            return Answer((), ())
        first_rows = relation if limit is None else relation.limit(limit)
        cells = [_column_sql(place, str(kind), cell) for place, kind in enumerate(relation.types, start=1)]
        places = ", ".join(f"#{place}" for place in range(1, len(cells) + 1))
        columns = relation.project(places).columns  # a second `a` is called `a_1` there
        return Answer(tuple(columns), tuple(first_rows.project(", ".join(cells)).fetchall()))
    except duckdb.IOException:  # the log may have been compacted meanwhile: `srl.store.reading` retries
        raise
    except duckdb.CatalogException as error:
        tables = ", ".join(table.name for table in TABLES)
        raise UserError(f"{in_one_line(error)} The tables are {tables}.") from error
    except duckdb.PermissionException as error:
        raise UserError(in_one_line(error), hint="add --unsafe to open other files than the log") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def expression(text: str, key: str) -> str:
    """A condition that a user typed, in parentheses. Raises UserError for one that closes them itself."""
    try:
        duckdb.extract_statements(f"SELECT 1 WHERE {text}\n")
    except duckdb.Error as error:
        raise UserError(f"'{text}' is not a condition in SQL: {in_one_line(error)}", key=key) from error
    return f"(\n{text}\n)"


def _reading(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """The rows of one query that only reads.

    DuckDB's table function `query` accepts one SELECT and nothing that writes, not even in a CTE. The kind of
    the statement is asked first, for a message that says what is expected.
    """
    statements = connection.extract_statements(query)
    kinds = [str(statement.type.name) for statement in statements]
    if kinds != ["SELECT"]:
        what = f"expected one query that only reads, found {', '.join(kinds) or 'none'}"
        raise UserError(what, hint="begin with SELECT or FROM, or add --unsafe")
    return connection.sql("FROM query($query)", params={"query": query})


def _column_sql(place: int, kind: str, cell: int | None) -> str:
    """SQL for the column at `place`, of the type `kind`."""
    if cell is not None and not _NUMBER.fullmatch(kind):
        return f"left(CAST(#{place} AS VARCHAR), {cell})"
    return f"CAST(#{place} AS VARCHAR)" if _AS_TEXT.search(kind) else f"#{place}"
