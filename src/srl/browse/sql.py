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
_PIVOT_BEGINS = {
    "(", "describe", "explain", "from", "pivot", "pivot_wider", "select", "summarize", "unpivot", "with",
}  # fmt: skip
_WRITES = {"copy", "create", "delete", "insert", "merge", "update"}
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

    On a sealed connection (`srl.store.reading`) DuckDB opens no other files than the log's, and what is
    asked here writes to none. Raises UserError with DuckDB's message, on one line.
    """
    try:
        return _answer(connection.sql(query) if unsafe else _reading(connection, query))
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


def _reading(connection: duckdb.DuckDBPyConnection, query: str) -> duckdb.DuckDBPyRelation:
    """The rows of one query that reads, or of EXPLAIN of one; raises UserError or DuckDB's error for others.

    DuckDB's function `query` takes nothing that writes, not in a CTE either. What EXPLAIN explains goes
    through it too: it begins with a word, with no option or comment before it, so DuckDB reads it the same
    way there and here. A PIVOT is several statements, which `query` does not take.
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
            f"only queries that read are answered here, not {kind}; "
            "begin with SELECT or FROM, or add --unsafe"
        )
    if kind == "MULTI":
        return connection.sql(query)
    relation = connection.sql("FROM query($asked)", params={"asked": asked})
    return connection.sql(query) if explain else relation


def _only_reads(pivot: str) -> bool:
    """Whether a query with a PIVOT begins as one that reads does, and has no word of one that writes."""
    words = _words(pivot)
    return words[0] in _PIVOT_BEGINS and _WRITES.isdisjoint(words)


def _words(query: str) -> list[str]:
    """The words and signs outside of texts and comments, in lower case."""
    text, tokens = query.encode(), duckdb.tokenize(query)
    ends = [start for start, _ in tokens[1:]] + [len(text)]
    left_out = (duckdb.token_type.string_const, duckdb.token_type.comment)
    return [
        text[start:end].decode(errors="replace").strip().lower()
        for (start, kind), end in zip(tokens, ends, strict=True)
        if kind not in left_out
    ]


def _kind(connection: duckdb.DuckDBPyConnection, query: str) -> str:
    """What DuckDB's parser takes the one statement of a query for."""
    found = connection.extract_statements(query)
    if len(found) != 1:
        raise UserError(f"expected one query, found {len(found)}; give one at a time")
    return str(found[0].type.name)
