"""Read-only SQL queries on the log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from srl.errors import UserError
from srl.store import TABLES, in_one_line

_AS_TEXT = re.compile(r"TIME ZONE|INTERVAL|TIMESTAMP_NS|TIME_NS|BLOB|GEOMETRY")
"""Types of DuckDB without an equivalent in Python; they are shown as DuckDB prints them."""
_AT_ONCE = 2048
"""Rows that DuckDB computes at a time."""
MOST_BYTES = 256 << 20
"""Bytes of a result, before Python makes several times as many of them."""


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
    most_bytes: int = MOST_BYTES,
) -> Answer:
    """The result of one query that only reads, or of any query if `unsafe`; at most `limit` rows, of texts
    and lists at most `cell` characters or elements.

    On a sealed connection (`srl.store.reading`) DuckDB opens no files but the log's, and the query cannot
    write. Raises UserError with DuckDB's message, on one line, or for a result of more than `most_bytes`.
    """
    try:
        relation = connection.sql(query) if unsafe else _reading(connection, query)
        if relation is None:  # a statement without rows
            return Answer((), ())
        chosen = relation if limit is None else relation.limit(limit)
        shown = [_shown(place, str(kind), cell) for place, kind in enumerate(relation.types, start=1)]
        columns = _distinct(relation.columns)
        return Answer(columns, _rows(chosen.project(", ".join(shown)), columns, most_bytes))
    except duckdb.IOException:  # the log may have been compacted meanwhile: `srl.store.reading` retries
        raise
    except duckdb.CatalogException as error:
        tables = ", ".join(table.name for table in TABLES)
        raise UserError(f"{in_one_line(error)} The tables are {tables}.") from error
    except duckdb.PermissionException as error:
        raise UserError(in_one_line(error), hint="add --unsafe to open other files than the log") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _reading(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """The rows of one query that only reads.

    DuckDB's table function `query` accepts one SELECT and nothing that writes, not even in a CTE. The kind of
    the statement is asked first, for a message that says what is expected.
    """
    statements = connection.extract_statements(query)
    kinds = [str(statement.type.name) for statement in statements]
    if kinds != ["SELECT"]:
        what = f"expected one query that only reads, not {', '.join(kinds) or 'nothing'}"
        raise UserError(what, hint="begin with SELECT or FROM, or add --unsafe")
    return connection.sql("FROM query($query)", params={"query": query})


def _shown(place: int, kind: str, cell: int | None) -> str:
    """SQL for the column at `place`, of the type `kind`."""
    if _AS_TEXT.search(kind):
        return f"CAST(#{place} AS VARCHAR)"
    if cell is None:
        return f"#{place}"
    if kind == "VARCHAR":
        return f"left(#{place}, {cell})"
    return f"#{place}[:{cell}]" if kind.endswith("[]") else f"#{place}"


def _rows(
    relation: duckdb.DuckDBPyRelation, columns: Sequence[str], most_bytes: int
) -> tuple[tuple[Any, ...], ...]:
    """The rows as DuckDB gives them to Python, which makes them of no more than `most_bytes`."""
    read = getattr(relation, "to_arrow_reader", None) or relation.fetch_arrow_reader  # its name in DuckDB 1
    reader = read(_AT_ONCE)
    batches, size = list[pa.RecordBatch](), 0
    try:
        for batch in reader:
            batches.append(batch)
            size += batch.nbytes
            if size > most_bytes:
                what = f"the result is larger than {most_bytes >> 20} MB"
                raise UserError(what, hint="choose fewer rows or columns, or cut them: left(question, 300)")
    except (pa.ArrowException, OSError) as error:  # DuckDB's error in the midst of the rows
        raise duckdb.InvalidInputException(str(error)) from error
    with duckdb.connect() as python:
        table = pa.Table.from_batches(batches, reader.schema).rename_columns(list(columns))
        return tuple(python.from_arrow(table).fetchall())


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """Unique column names: a second `a` becomes `a_1`."""
    distinct: list[str] = []
    for name in names:
        seen = sum(other == name for other in names[: len(distinct)])
        distinct.append(f"{name}_{seen}" if seen else name)
    return tuple(distinct)
