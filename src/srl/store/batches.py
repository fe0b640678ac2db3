"""Reads the trajectories of a log of any size in batches, with the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb

from srl.store.records import Record, Row, read_with_rows

SIZE = 1000
"""The most trajectories that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories of one run, phase and step in the order written, each with its row of `trajectories`.

    `number` counts the batches of the step, from 1.
    """

    run_id: str
    phase: str
    step: int
    number: int
    pairs: list[tuple[Record, Row]]


def batches(
    connection: duckdb.DuckDBPyConnection,
    where: str = "true",
    parameters: Sequence[object] = (),
    *,
    tokens: bool = True,
) -> Iterator[Batch]:
    """The trajectories that satisfy the SQL condition `where`, by run, phase and step, at most `SIZE` at a
    time. What training computed for their tokens is left out; without `tokens`, segments have texts alone."""
    query = f"SELECT DISTINCT run_id, phase, step FROM trajectories WHERE {where} ORDER BY ALL"
    here = "run_id = ? AND phase = ? AND step = ?"
    for run_id, phase, step in connection.execute(query, list(parameters)).fetchall():
        place = [run_id, phase, step]
        query = f"SELECT id FROM trajectories WHERE ({where}) AND {here} ORDER BY position, id"
        ids = [one for (one,) in connection.execute(query, [*parameters, *place]).fetchall()]
        for number, start in enumerate(range(0, len(ids), SIZE), start=1):
            some = [*place, ids[start : start + SIZE]]
            chosen = f"{here} AND id IN (SELECT unnest(?))"
            pairs = read_with_rows(connection, chosen, some, "ids" if tokens else "texts")
            yield Batch(run_id, phase, step, number, pairs)
