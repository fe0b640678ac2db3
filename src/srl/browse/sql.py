"""Read-only SQL queries on the log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

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
    connection: duckdb.DuckDBPyConnection, query: str, *, unsafe: bool = False, limit: int | None = None
) -> Answer:
    """The result of one query that only reads, or of any query if `unsafe`; at most `limit` rows.

    On a sealed connection (`srl.store.reading`) DuckDB opens no files but the log's, and the query cannot
    write. Raises UserError with DuckDB's message, on one line.
    """
    try:
        return _answer(connection.sql(query) if unsafe else _reading(connection, query), limit)
    except duckdb.IOException:  # the log may have been compacted meanwhile: `srl.store.reading` retries
        raise
    except duckdb.CatalogException as error:
        raise UserError(f"{in_one_line(error)} The tables are {_TABLES}.") from error
    except duckdb.PermissionException as error:
        raise UserError(f"{in_one_line(error)}; add --unsafe to open other files than the log") from error
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _answer(relation: duckdb.DuckDBPyRelation | None, limit: int | None) -> Answer:
    """The rows of a relation; a statement without any has none."""
    if relation is None:
        return Answer((), ())
    shown = [
        f"CAST(#{place} AS VARCHAR)" if _AS_TEXT.search(str(kind)) else f"#{place}"
        for place, kind in enumerate(relation.types, start=1)
    ]
    chosen = relation if limit is None else relation.limit(limit)
    return Answer(_distinct(relation.columns), tuple(chosen.project(", ".join(shown)).fetchall()))


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
