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

_READS = ("SELECT", "MULTI")  # MULTI is PIVOT, which makes a type of its values first
_PIVOT_BEGINS = {
    "(", "describe", "explain", "from", "pivot", "pivot_wider", "select", "summarize", "unpivot", "with",
}  # fmt: skip
_WRITES = {"copy", "create", "delete", "insert", "merge", "update"}
_TABLES = ", ".join(table.name for table in TABLES)
_EXPLAIN = re.compile(r"\s*explain\s+(analyze\s+)?(?=[a-z])", re.IGNORECASE)
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

    @property
    def is_plan(self) -> bool:
        """Whether it is the output of EXPLAIN."""
        return self.columns == ("explain_key", "explain_value")

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
        raise UserError(f"{in_one_line(error)} The tables are {_TABLES}.") from error
    except duckdb.PermissionException as error:
        raise UserError(f"{in_one_line(error)}; add --unsafe to open other files than the log") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


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
                raise UserError(
                    f"the result is larger than {most_bytes >> 20} MB: choose fewer rows or columns, or cut "
                    "them, as in left(question, 300)"
                )
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


def _reading(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """The rows of one query that only reads, or of its EXPLAIN. Raises UserError or DuckDB's error.

    DuckDB's function `query` accepts nothing that writes, not even in a CTE. The query after EXPLAIN goes
    through it too: no option or comment may stand before it, so that DuckDB parses it the same way. A PIVOT
    is several statements, which `query` does not accept.
    """
    kind, asked = _kind(connection, query), query
    explain = _EXPLAIN.match(query) if kind == "EXPLAIN" else None
    if explain:
        asked = query[explain.end() :]
        kind = _kind(connection, asked)
    elif kind == "EXPLAIN":
        raise UserError("expected EXPLAIN or EXPLAIN ANALYZE right before the query, and no options")
    if kind not in _READS or (kind == "MULTI" and not _only_reads(asked)):
        raise UserError(
            f"expected a query that only reads, found {kind}; begin with SELECT or FROM, or add --unsafe"
        )
    if kind == "MULTI":
        return connection.sql(query)
    relation = connection.sql("FROM query($asked)", params={"asked": asked})
    return connection.sql(query) if explain else relation


def _only_reads(pivot: str) -> bool:
    """Whether a query with a PIVOT begins like a reading one and has no word that writes."""
    words = _words(pivot)
    return words[0] in _PIVOT_BEGINS and _WRITES.isdisjoint(words)


def _words(query: str) -> list[str]:
    """The words and signs outside of string constants and comments, in lower case."""
    text, tokens = query.encode(), duckdb.tokenize(query)
    ends = [start for start, _ in tokens[1:]] + [len(text)]
    left_out = (duckdb.token_type.string_const, duckdb.token_type.comment)
    return [
        text[start:end].decode(errors="replace").strip().lower()
        for (start, kind), end in zip(tokens, ends, strict=True)
        if kind not in left_out
    ]


def _kind(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """The kind of statement, by DuckDB's parser. Raises UserError unless there is exactly one."""
    found = connection.extract_statements(query)
    if len(found) != 1:
        raise UserError(f"expected one query, found {len(found)}; give one at a time")
    return str(found[0].type.name)
