"""Writes a log: one part per finished step, compaction, and one file at the end of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow.parquet as pq

from srl.errors import UserError
from srl.files import NotWritten, discard, is_disk_full, remove_leftovers
from srl.process import Process
from srl.safe import quoted
from srl.store import run_info
from srl.store.damage import find_damage, may_be_damage, set_aside
from srl.store.database import attach
from srl.store.drop_steps import drop_steps, drop_trajectories, reopen
from srl.store.finished import replacing_database, write_database
from srl.store.lock import LogLock
from srl.store.parts import (
    FINISHED,
    PARTS_DIRECTORY,
    Part,
    live_parts,
    merge_parts,
    next_number,
    sweep,
    write_part,
)
from srl.store.records import Record, part_tables
from srl.store.rescores import drop_rescores
from srl.store.run_info import RunInfo
from srl.store.watches import write_watches
from srl.trajectory import Phase

COMPACT_AT = 32
"""Number of single parts of one writer that are compacted to one."""

ERROR_WIDTH = 500
"""Characters of a run's error that are kept."""

_logger = logging.getLogger(__name__)
_MAIN = "main"
_LAST = 2**31 - 1


class LogWriter:
    """Writes a run's log to `directory`, which readers may open at any time.

    One writer is `main`: it records the status of the run, finishes the log, and holds the log's lock until
    it ends the log. Others (verl's workers) only write, under their own name `worker` of letters and digits.
    With `adds`, what it writes of a step is added to what earlier writers wrote of it (an evaluation is one
    step in many parts). `launcher` is the process that this one writes for, if it is another. As a context
    manager it finishes the log; on an error it keeps the parts and records how the run ended. The first write
    to a finished log turns it into parts again. Damaged files are moved to `damaged/`, with a call of `warn`
    that names their steps. Raises UserError, which names the process, where another one changes the log.
    """

    def __init__(
        self,
        directory: Path | str,
        run: RunInfo,
        *,
        worker: str = _MAIN,
        adds: bool = False,
        launcher: Process | None = None,
        warn: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.directory = Path(directory)
        self._parts = self.directory / PARTS_DIRECTORY
        self._run, self._worker, self._warn, self._open = run, worker, warn, True
        self._adds = adds
        if not worker.isidentifier():
            raise ValueError(f"a worker's name is letters, digits and underscores, not {worker!r}")
        self._lock = LogLock(self.directory, "written", launcher)
        if worker == _MAIN:
            self._begin()
        self._earlier = set() if adds else self._find_earlier()
        self._count()

    def _begin(self) -> None:
        """Lock the log, and say in its manifest that it is being written."""
        try:
            self._lock.acquire()
            run_info.check_not_written(self.directory)
            self._set_damage_aside()
            run_info.begin(self.directory, self._run, self._last_written())
        except BaseException:
            self._lock.release()
            with suppress(OSError):
                self.directory.rmdir()  # if it is new, and so empty
            raise

    def write(self, step: int, phase: Phase, records: Sequence[Record], metrics: Mapping[str, float]) -> None:
        """Add a finished step, atomically.

        Unless the writer `adds`, it replaces what an earlier writer of the same name wrote for this step and
        phase; two writes by the same writer add up. Raises ValueError for records of another step or phase.
        """
        tables = part_tables(self._run.run_id, step, phase, records, metrics)
        self._reopen()
        if (step, phase) in self._earlier:  # rescores first: one that is lost is computed again
            drop_rescores(self.directory, lambda *row: row[:2] == (step, phase))
            self._merging(
                lambda: drop_steps(self._parts, lambda *found: found == (step, phase), self._worker)
            )
            self._earlier.discard((step, phase))
            self._count()
        write_part(self._parts, step, phase, self._worker, self._number, tables)
        self._number += 1
        self._single += 1
        if self._single >= COMPACT_AT:
            self._merging(self._compact)

    def write_watches(self, fired: Sequence[Mapping[str, Any]]) -> None:
        """Replace the table of watches: a row for each that fired, in order, with its columns by name."""
        write_watches(self.directory, self._run.run_id, fired)

    def drop_steps_after(self, after_step: int) -> None:
        """Drop every step after `after_step`, of all writers; a resumed run writes them again."""
        self._reopen(after_step)
        drop_rescores(self.directory, lambda step, *_: step > after_step)
        self._merging(lambda: drop_steps(self._parts, lambda step, phase: step > after_step))
        self._earlier = {(step, phase) for step, phase in self._earlier if step <= after_step}
        self._count()

    def drop_trajectories(self, ids: Set[str]) -> None:
        """Drop the trajectories with these ids, of all writers, from all tables but `steps`."""
        self._reopen()
        drop_rescores(self.directory, lambda step, phase, trajectory: trajectory in ids)
        self._merging(lambda: drop_trajectories(self._parts, ids))
        self._count()

    def finish(self, status: str = "finished") -> None:
        """End the run: write one `log.duckdb`, atomically, and remove the parts."""
        self._require_main()
        with self._lock:
            run_info.end(self.directory, self._run, status)
            self._open = False
            if not (self.directory / FINISHED).exists():
                self._merging(self._write_finished)
            self._clear_parts()

    def _write_finished(self) -> None:
        path = self.directory / FINISHED
        try:
            with replacing_database(self.directory) as written:
                write_database(written, run_info.run_row(self.directory), [self.directory])
        except Exception as error:
            if is_disk_full(error, self.directory):
                raise NotWritten(
                    f"{path} was not written: the disk is full", hint="the run's parts are kept"
                ) from error
            raise

    def close(self, status: str, error: str = "") -> None:
        """Record how the run ended, and with which error; keep the parts for a resumed run."""
        self._require_main()
        with self._lock:
            run_info.end(self.directory, self._run, status, quoted(error, ERROR_WIDTH))
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker != _MAIN or not self._open:
            return
        if kind is None:
            self.finish()
        else:
            failed = issubclass(kind, Exception)
            self.close("failed" if failed else "interrupted", str(error) or kind.__name__ if failed else "")

    def _require_main(self) -> None:
        if self._worker != _MAIN:
            raise UserError(f"only the main writer can end a log, not the worker {self._worker!r}")

    def _find_earlier(self) -> set[tuple[int, str]]:
        """The steps of earlier writers of this name, in the parts or the finished log."""
        if (finished := self.directory / FINISHED).exists():
            with duckdb.connect() as connection:
                attach(connection, finished, "log")
                return set(connection.execute("SELECT step, phase FROM log.raw.steps").fetchall())
        mine = [part for part in live_parts(self._parts) if part.worker == self._worker]
        return set().union(*(part.steps() for part in mine))

    def _merging(self, merge: Callable[[], None]) -> None:
        """Run `merge()`; on an error set damaged parts aside, if there are any, and retry."""
        try:
            merge()
        except Exception as error:
            if not may_be_damage(error.__cause__ or error) or not self._set_damage_aside():
                raise
            merge()

    def _set_damage_aside(self) -> bool:
        """Move damaged files aside; returns whether there were any.

        Raises UserError for a file that may be whole, such as a database that another program holds open.
        """
        found = find_damage(self.directory)
        for damage in found:
            if damage.may_be_whole:
                raise UserError(damage.why)
            place = set_aside(damage)
            again = "evaluated" if self._adds else "trained"
            lost = f"; {damage.steps}: lost unless {again} again" if damage.steps else ""
            self._warn(f"{damage}; moved to {place}{lost}")
        return bool(found)

    def _last_written(self) -> datetime | None:
        """When the newest step in the parts was written (UTC)."""
        files = [part.file("steps") for part in live_parts(self._parts)]
        times = [pq.read_table(file, columns=["written"])["written"].to_pylist() for file in files]
        return max(filter(None, chain.from_iterable(times)), default=None)

    def _count(self) -> None:
        self._number = next_number(self._parts, self._worker)
        self._single = len(self._single_parts())

    def _single_parts(self) -> list[Part]:
        live = live_parts(self._parts)
        return [part for part in live if part.worker == self._worker and not part.is_compacted]

    def _compact(self) -> None:
        sweep(self._parts)
        merge_parts(self._parts, self._single_parts(), self._worker)
        self._count()

    def _reopen(self, until: int = _LAST) -> None:
        """Turn a finished log into parts again; current readers keep the file open."""
        finished = self.directory / FINISHED
        if self._worker != _MAIN:
            return
        self._lock.acquire()
        if not finished.exists():
            return
        self._clear_parts()
        reopen(finished, self._parts, self._worker, until)
        finished.unlink()
        self._count()

    def _clear_parts(self) -> None:
        """Remove all parts, hidden first by a rename, and leftovers of killed writers."""
        if self._parts.exists():
            discard(self._parts)
        remove_leftovers(self.directory, alone=True)
