"""What a log loses: steps after a checkpoint, and episodes that are sampled again.

Each part that holds some of it is removed, or replaced by one without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from srl.files import discard
from srl.store.parts import live_parts, merge_parts, sweep


def drop_steps(directory: Path, drop: Callable[[int, str], bool], worker: str | None = None) -> None:
    """Drop every (step, phase) for which `drop` is true, the last first; of one worker, or of all."""
    sweep(directory)
    for part in reversed(live_parts(directory)):
        if worker not in (None, part.worker):
            continue
        steps = part.steps()
        dropped = {step for step in steps if drop(*step)}
        if dropped == steps:
            discard(part.path)
        elif dropped:
            merge_parts(directory, [part], part.worker, partial(_without_steps, dropped=dropped))


def _without_steps(table: pa.Table, dropped: Collection[tuple[int, str]]) -> pa.Table:
    for phase in {phase for _, phase in dropped}:
        steps = pa.array([step for step, step_phase in dropped if step_phase == phase], pa.int32())
        is_dropped = pc.and_(pc.equal(table["phase"], phase), pc.is_in(table["step"], steps))
        table = table.filter(pc.invert(is_dropped))
    return table


def drop_trajectories(directory: Path, ids: Set[str]) -> None:
    """Drop the trajectories with these ids, of all writers; `steps` count fewer trajectories."""
    sweep(directory)
    for part in live_parts(directory):
        dropped = ids & set(pq.read_table(part.file("trajectories"), columns=["id"])["id"].to_pylist())
        if dropped:
            merge_parts(directory, [part], part.worker, _Without(dropped))


class _Without:
    """Filters the tables of one part."""

    def __init__(self, ids: Set[str]) -> None:
        self._ids, self._left = pa.array(sorted(ids)), len(ids)

    def __call__(self, table: pa.Table) -> pa.Table:
        if "metrics" in table.column_names:
            return self._fewer(table)
        key = table["trajectory_id" if "trajectory_id" in table.column_names else "id"]
        return table.filter(pc.invert(pc.is_in(key, self._ids)))

    def _fewer(self, steps: pa.Table) -> pa.Table:
        """The rows of `steps`; in a log that is added to, a step has several, of which none gets below 0."""
        counts = []
        for count in steps["trajectories"].to_pylist():
            fewer = min(count, self._left)
            self._left -= fewer
            counts.append(count - fewer)
        place = steps.schema.get_field_index("trajectories")
        return steps.set_column(place, steps.schema.field(place), pa.array(counts, pa.int32()))
