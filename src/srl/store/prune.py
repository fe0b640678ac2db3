"""Pruning: the trajectories of some steps go, with segments, searches and rescores; their metrics stay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from srl.errors import UserError
from srl.files import MANIFEST, NotWritten, is_disk_full, remove_leftovers
from srl.process import Process
from srl.store import run_info
from srl.store.damage import damage_beside, find_damage, left_out
from srl.store.database import in_one_line, quoted
from srl.store.finished import replacing_database, write_database
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
SELECT step, phase, written, coalesce(found.trajectories, 0),
    coalesce(tokens / sum(tokens) OVER (), 0.0) AS share
FROM steps LEFT JOIN (
    SELECT step, phase, count(*) AS trajectories, greatest(sum(total_tokens), 1) AS tokens
    FROM raw.trajectories GROUP BY step, phase
) AS found USING (step, phase)
WHERE found.trajectories > 0 OR (step, phase) IN (SELECT step, phase FROM raw.rescores)
ORDER BY phase, step
"""
"""The steps with trajectories, and those that a killed prune left with rescores alone."""


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
    """A step whose trajectories go: how many, and their share of the log's bytes, by their tokens.

    It has none where an earlier prune was killed before the rescores had gone too.
    """

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
    last = {phase: step for step, phase, _, trajectories, _ in found if trajectories}
    takes = sum(size.bytes for size in sizes(log) if size.table in _PRUNED)
    return [
        Pruned(step, phase, trajectories, round(share * takes))
        for step, phase, written, trajectories, share in found
        if phase != EVALUATION and rule.prunes(step, phase, written, last.get(phase, -1))
    ]


def prune(log: Path, gone: Places) -> None:
    """Remove the trajectories of the steps `gone` from `log`; a kill leaves it as it was, or pruned.

    Rescores go last: a kill may leave those of trajectories that have gone, and the repeated prune removes
    them. Raises UserError for a log that is being written or pruned, or is damaged.
    """
    with LogLock(log, "pruned"):
        _check_not_written(log)
        if damage := next(chain(find_damage(log, thorough=False), damage_beside(log, thorough=True)), None):
            raise UserError(left_out(damage))
        remove_leftovers(log, alone=True)
        with _saying(log, "was not pruned", "it is as it was"):
            _rewrite(log, gone)
        with _saying(log, "was pruned, but not all rescores", "repeat the command"):
            drop_rescores(log, lambda step, phase, _: (step, phase) in gone)


@contextmanager
def _saying(log: Path, what: str, then: str) -> Iterator[None]:
    """Inside, an error in writing is one line that says `what` happened to the log, and `then`."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, NotWritten) as error:
        if is_disk_full(error, log):
            raise NotWritten(f"{log} {what}: the disk is full; free some space; {then}") from error
        raise UserError(f"{log} {what}: {in_one_line(error)}; {then}") from error


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
