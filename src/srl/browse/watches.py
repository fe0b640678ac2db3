"""Which watches fired in a run, as rows, and as marks on its curves."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import duckdb

from srl.store import rows

Marks = tuple[tuple[int, str], ...]
"""Steps at which watches of a run fired, each with their names."""


def watches(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """One row each time that a watch fired, run by run, in that order."""
    query = "SELECT watches.* FROM watches JOIN runs USING (run_id) ORDER BY started, run_id, number"
    return rows(connection, query)


def marks(connection: duckdb.DuckDBPyConnection) -> dict[str, Marks]:
    """The marks of every run in which a watch fired, by step."""
    query = """
        SELECT run_id, step, string_agg(DISTINCT watch, ', ' ORDER BY watch) AS names FROM watches
        GROUP BY run_id, step ORDER BY run_id, step
    """
    found: dict[str, Marks] = defaultdict(tuple)
    for row in rows(connection, query):
        found[row["run_id"]] += ((row["step"], row["names"]),)
    return found
