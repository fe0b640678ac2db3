"""Pruning: the trajectories of some steps go, with segments, searches and rescores; their metrics stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from srl.errors import UserError
from srl.files import NotWritten, why_not_written
from srl.manifests import MANIFEST
from srl.processes import Process
from srl.store import run_info
from srl.store.damage import find_damage, left_out
from srl.store.database import in_one_line, quoted
from srl.store.finished import clear_aside, replacing_database, write_database
from srl.store.lock import LogLock
from srl.store.parts import FINISHED, PARTS_DIRECTORY, live_parts, merge_parts, sweep
from srl.store.reader import reading
from srl.store.rescores import drop_rescores
from srl.store.sizes import sizes
from srl.workspace import EVALUATION

Places = Collection[tuple[int, str]]
"""Steps with their phases."""

_PRUNED = ("trajectories", "segments", "searches")
_WRITER = "main"
_QUERY = """
SELECT step, phase, written, found.trajectories, tokens / sum(tokens) OVER () AS share
FROM steps JOIN (
    SELECT step, phase, count(*) AS trajectories, greatest(sum(total_tokens), 1) AS tokens
    FROM raw.trajectories GROUP BY step, phase
) AS found USING (step, phase)
ORDER BY phase, step
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which steps are pruned: those that meet every condition that is given.

    `steps` are the first and the last, `before` a time in UTC. With `keep_every` n, the steps that n divides
    stay, and the last of each phase.
    """

    steps: tuple[int, int] | None = None
    phase: str | None = None
    before: datetime | None = None
    keep_every: int | None = None

    def prunes(self, step: int, phase: str, written: datetime, last: int) -> bool:
        """Whether the trajectories of this step go; `last` is the last step of its phase."""
        return (
            (self.steps is None or self.steps[0] <= step <= self.steps[1])
            and (self.phase is None or self.phase == phase)
            and (self.before is None or written < self.before)
            and (self.keep_every is None or (step % self.keep_every != 0 and step != last))
        )


@dataclass(frozen=True, slots=True)
class Pruned:
    """A step whose trajectories go: how many, and their share of the log's bytes, by their tokens."""

    step: int
    phase: str
    trajectories: int
    bytes: int


def plan(log: Path, rule: Rule) -> list[Pruned]:
    """The steps that `rule` prunes. Raises UserError for evaluations, whose scores are their trajectories."""
    found = reading([log], lambda connection: connection.execute(_QUERY).fetchall())
    if rule.phase == EVALUATION or (found and all(phase == EVALUATION for _, phase, *_ in found)):
        raise UserError(
            "the scores of an evaluation are computed from its trajectories, so none are pruned; a run that "
            "is not needed is removed with its directory"
        )
    last = {phase: step for step, phase, *_ in found}
    takes = sum(size.bytes for size in sizes(log) if size.table in _PRUNED)
    return [
        Pruned(step, phase, trajectories, round(share * takes))
        for step, phase, written, trajectories, share in found
        if phase != EVALUATION and rule.prunes(step, phase, written, last[phase])
    ]


def prune(log: Path, gone: Places) -> None:
    """Remove the trajectories of the steps `gone` from `log`; a kill leaves it as it was, or pruned.

    Raises UserError for a log that is being written or pruned, or is damaged.
    """
    with LogLock(log, "pruned"):
        _check_not_written(log)
        if damage := next(iter(find_damage(log, thorough=False)), None):
            raise UserError(left_out(damage))
        clear_aside(log)
        drop_rescores(log, lambda step, phase, _: (step, phase) in gone)
        try:
            _rewrite(log, gone)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            if why := why_not_written(error, log):
                raise NotWritten(f"{log} was not pruned: {why}; it is as it was") from error
            raise UserError(f"{log} was not pruned: {in_one_line(error)}") from error


def _check_not_written(log: Path) -> None:
    """Raise UserError if a process writes this log, or may do so on another machine."""
    manifest = run_info.load(log)
    status = run_info.status(manifest)
    if status == run_info.RUNNING:
        raise run_info.being_written(log, manifest)
    if status == "unknown":
        who = Process(**manifest["writer"])
        raise UserError(f"{log} may be being written by {who}; type the command on that machine")


def _rewrite(log: Path, gone: Places) -> None:
    """One rename replaces the database, or all parts by one."""
    manifest = (log / MANIFEST).read_bytes()
    if (log / FINISHED).exists():
        with replacing_database(log) as path:
            write_database(path, run_info.run_row(log), [log], _condition(gone))
            if (log / MANIFEST).read_bytes() != manifest:  # on a file system without locks
                raise UserError(f"{log} is as it was: its run was resumed meanwhile")
        return
    directory = log / PARTS_DIRECTORY
    merge_parts(directory, live_parts(directory), _WRITER, lambda table: _without(table, gone))
    sweep(directory)


def _by_phase(gone: Places) -> dict[str, list[int]]:
    phases = sorted({phase for _, phase in gone})
    return {phase: sorted(step for step, of in gone if of == phase) for phase in phases}


def _condition(gone: Places) -> str:
    """SQL for the rows of these steps."""
    of_phase = (
        f"(phase = {quoted(phase)} AND step IN ({', '.join(map(str, steps))}))"
        for phase, steps in _by_phase(gone).items()
    )
    return " OR ".join(of_phase) or "false"


def _without(table: pa.Table, gone: Places) -> pa.Table:
    """A part's table without the rows of these steps; `steps`, which has the metrics, stays."""
    if "metrics" in table.column_names:
        return table
    for phase, steps in _by_phase(gone).items():
        here = pc.and_(pc.equal(table["phase"], phase), pc.is_in(table["step"], pa.array(steps, pa.int32())))
        table = table.filter(pc.invert(here))
    return table


def summed(pruned: Sequence[Pruned]) -> list[dict[str, object]]:
    """For each phase how many steps, from which to which, and their trajectories and bytes."""
    by_phase: dict[str, list[Pruned]] = {}
    for one in pruned:
        by_phase.setdefault(one.phase, []).append(one)
    return [
        {
            "phase": phase,
            "steps": len(some),
            "first": some[0].step,
            "last": some[-1].step,
            "trajectories": sum(one.trajectories for one in some),
            "bytes": sum(one.bytes for one in some),
        }
        for phase, some in by_phase.items()
    ]
