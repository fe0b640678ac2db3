"""Reads the trajectories of a log of any size in batches, with the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import duckdb

from srl.store.records import Record, Row, read_with_rows

SIZE = 1000
"""The most trajectories that are in memory at a time."""


def batches(
    connection: duckdb.DuckDBPyConnection,
    where: str = "true",
    parameters: Sequence[object] = (),
    *,
    tokens: bool = True,
) -> Iterator[list[tuple[Record, Row]]]:
    """The trajectories that satisfy the SQL condition `where`, each with its row, in the order written.

    By run, phase and step, at most `SIZE` at a time. What training computed for their tokens is left out;
    without `tokens`, segments have texts alone.
    """
    query = f"SELECT DISTINCT run_id, phase, step FROM trajectories WHERE {where} ORDER BY ALL"
    same_step = "run_id = ? AND phase = ? AND step = ?"
    for place in connection.execute(query, list(parameters)).fetchall():
        query = f"SELECT id FROM trajectories WHERE ({where}) AND {same_step} ORDER BY position, id"
        ids = [name for (name,) in connection.execute(query, [*parameters, *place]).fetchall()]
        for start in range(0, len(ids), SIZE):
            arguments = [*place, ids[start : start + SIZE]]
            condition = f"{same_step} AND id IN (SELECT unnest(?))"
            yield read_with_rows(connection, condition, arguments, "ids" if tokens else "texts")
