"""Dropping steps from a log: those after the checkpoint that a run is resumed from, and those written again.

A finished log is reopened as parts first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from srl.store.database import attach
from srl.store.parts import (
    compacted_path,
    live_parts,
    merge_parts,
    remove_part,
    sweep,
    write_compacted,
)


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


def reopen(finished: Path, parts: Path, worker: str, until: int) -> None:
    """Write one part with the steps of a finished log up to `until`, if there are any."""
    with duckdb.connect() as connection:
        attach(connection, finished, "log")
        query = "SELECT DISTINCT step FROM log.raw.steps WHERE step <= ? ORDER BY step"
        steps = [step for (step,) in connection.execute(query, [until]).fetchall()]

        def batches(table: str) -> Iterable[pa.Table]:
            for step in steps:
                yield pa.table(connection.sql(f"SELECT * FROM log.raw.{table} WHERE step = {step}"))

        if steps:
            path = compacted_path(parts, steps[0], steps[-1], worker, 1)
            write_compacted(path, batches, replaces=set())
