"""Dropping from a log: steps after the checkpoint that a run is resumed from, and what is written again.

A finished log is reopened as parts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.store.database import attach
from srl.store.parts import (
    Keep,
    compacted_path,
    live_parts,
    merge_parts,
    remove_part,
    sweep,
    write_compacted,
)

_ROWS = 2048
"""Rows of a finished log that are in memory at a time."""


def drop_steps(directory: Path, drop: Callable[[int, str], bool], worker: str | None = None) -> None:
    """Drop every (step, phase) for which `drop` is true, the last first; of one worker, or of all."""
    sweep(directory)
    for part in reversed(live_parts(directory)):
        if worker not in (None, part.worker):
            continue
        steps = part.steps()
        dropped = {step for step in steps if drop(*step)}
        if dropped == steps:
            remove_part(part)
        elif dropped:
            merge_parts(directory, [part], part.worker, partial(_without, dropped=dropped))


def _without(table: pa.Table, dropped: set[tuple[int, str]]) -> pa.Table:
    pairs = zip(table["step"].to_pylist(), table["phase"].to_pylist(), strict=True)
    return table.filter(pa.array([pair not in dropped for pair in pairs], pa.bool_()))


def drop_trajectories(directory: Path, ids: Set[str]) -> None:
    """Drop the trajectories with these ids, of all writers, from every part that has any of them."""
    sweep(directory)
    for part in live_parts(directory):
        found = ids & set(pq.read_table(part.file("trajectories"), columns=["id"])["id"].to_pylist())
        if found:
            merge_parts(directory, [part], part.worker, _without_trajectories(found))


def _without_trajectories(ids: Set[str]) -> Keep:
    """Filters the tables of one part; its `steps` count fewer trajectories."""
    left = len(ids)

    def keep(table: pa.Table) -> pa.Table:
        nonlocal left
        if "trajectories" not in table.column_names:
            column = "trajectory_id" if "trajectory_id" in table.column_names else "id"
            return table.filter(pa.array([key not in ids for key in table[column].to_pylist()], pa.bool_()))
        counts = table["trajectories"].to_pylist()
        for row, count in enumerate(counts):
            counts[row] -= min(count, left)
            left -= count - counts[row]
        place = table.schema.get_field_index("trajectories")
        return table.set_column(place, table.schema.field(place), pa.array(counts, pa.int32()))

    return keep


def reopen(finished: Path, parts: Path, worker: str, until: int) -> None:
    """Write one part with the steps of a finished log up to `until`, if there are any."""
    with duckdb.connect() as connection:
        attach(connection, finished, "log")
        query = "SELECT DISTINCT step FROM log.raw.steps WHERE step <= ? ORDER BY step"
        steps = [step for (step,) in connection.execute(query, [until]).fetchall()]

        def batches(table: str) -> Iterable[pa.Table]:
            for step in steps:
                found = connection.sql(f"SELECT * FROM log.raw.{table} WHERE step = {step}")
                for batch in found.fetch_arrow_reader(_ROWS):
                    yield pa.Table.from_batches([batch])

        if steps:
            path = compacted_path(parts, steps[0], steps[-1], worker, 1)
            write_compacted(path, batches, replaces=set())
