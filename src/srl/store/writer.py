"""Writes a log: one part per finished step, compaction, and the catalogue for other DuckDB clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import suppress
from datetime import datetime
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.errors import UserError, error_line
from srl.files import remove_leftovers
from srl.safe import quoted
from srl.store import run_info
from srl.store.database import write_catalogue
from srl.store.drop import drop_steps, drop_trajectories
from srl.store.lock import LogLock
from srl.store.parts import (
    PARTS_DIRECTORY,
    damaged_parts,
    is_damage,
    live_parts,
    merge_parts,
    next_number,
    sweep,
    write_part,
)
from srl.store.records import Record, part_tables
from srl.store.run_info import RunInfo
from srl.trajectory import Phase

COMPACT_AT = 32
"""Number of single parts of one writer that are compacted to one."""

ERROR_WIDTH = 500
"""Characters of a run's error that are kept."""

_logger = logging.getLogger(__name__)
_MAIN = "main"


class LogWriter:
    """Writes a run's log to `directory`, which readers may open at any time.

    One writer is `main`: it records the status of the run and holds the log's lock until it ends the log.
    Others only write, under their own name `worker` of letters and digits. With `adds`, what it writes of a
    step is added to what earlier writers wrote of it (an evaluation is one step in many parts). As a context
    manager it finishes the log; on an error it records how the run ended. `warn` is called with the parts
    that cannot be read: they are renamed `damaged-…`, and nobody reads them again. Raises UserError, which
    names the process, where another one changes the log.
    """

    def __init__(
        self,
        directory: Path | str,
        run: RunInfo,
        *,
        worker: str = _MAIN,
        adds: bool = False,
        warn: Callable[[str], None] = _logger.warning,
    ) -> None:
        self.directory = Path(directory).absolute()
        self._parts = self.directory / PARTS_DIRECTORY
        self._run, self._worker, self._warn = run, worker, warn
        self._open, self._has_catalogue = True, False
        if not worker.isidentifier():
            raise ValueError(f"a worker's name is letters, digits and underscores, not {worker!r}")
        self._lock = LogLock(self.directory)
        if worker == _MAIN:
            self._begin()
        own_parts = [part for part in live_parts(self._parts) if part.worker == worker]
        self._earlier = set[tuple[int, str]]() if adds else set().union(*(part.steps() for part in own_parts))
        self._count()

    def _begin(self) -> None:
        """Lock the log, and say in its manifest that it is being written."""
        try:
            self._lock.acquire()
            run_info.check_not_written(self.directory)
            self._set_damaged_aside()
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
        if (step, phase) in self._earlier:
            self._change(lambda: drop_steps(self._parts, lambda *key: key == (step, phase), self._worker))
            self._earlier.discard((step, phase))
        write_part(self._parts, step, phase, self._worker, self._number, tables)
        self._number += 1
        self._single += 1
        if self._worker == _MAIN and not self._has_catalogue:
            write_catalogue(self.directory)
            self._has_catalogue = True
        if self._single >= COMPACT_AT:
            self._compact([self._worker])

    def write_watches(self, fired: Sequence[Mapping[str, Any]]) -> None:
        """Replace the table of watches: a row for each that fired, in order, with its columns by name."""
        run_info.write_watches(self.directory, fired)

    def drop_steps_after(self, after_step: int) -> None:
        """Drop every step after `after_step`, of all writers; a resumed run writes them again."""
        self._change(lambda: drop_steps(self._parts, lambda step, phase: step > after_step))
        self._earlier = {(step, phase) for step, phase in self._earlier if step <= after_step}

    def drop_trajectories(self, ids: Set[str]) -> None:
        """Drop the trajectories with these ids, of all writers, from all tables but `steps`."""
        self._change(lambda: drop_trajectories(self._parts, ids))

    def finish(self, status: str = run_info.FINISHED) -> None:
        """End the run: compact what is left, and write the catalogue anew."""
        self._require_main()
        with self._lock:
            self._compact({part.worker for part in live_parts(self._parts)})
            self._clear_parts()
            run_info.end(self.directory, self._run, status)
            self._open = False
            write_catalogue(self.directory)

    def close(self, status: str, error: str = "") -> None:
        """Record how the run ended, and with which error; a resumed run goes on."""
        self._require_main()
        with self._lock:
            run_info.end(self.directory, self._run, status, quoted(error, ERROR_WIDTH))
            self._open = False
            with suppress(UserError, OSError, duckdb.Error):  # what ended the run matters more
                write_catalogue(self.directory)

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

    def _change(self, change: Callable[[], None]) -> None:
        """Do `change()`, which reads the parts and writes others in their place."""
        self._set_damaged_aside()
        change()
        self._count()

    def _set_damaged_aside(self) -> None:
        for part, fault in damaged_parts(self._parts).items():
            os.rename(part.path, part.path.with_name(f"damaged-{part.path.name}"))
            self._warn(f"{part} of run {self._run.run_id} is lost: {fault}; renamed damaged-{part.path.name}")

    def _last_written(self) -> datetime | None:
        """When the newest step in the parts was written (UTC)."""
        files = [part.file("steps") for part in live_parts(self._parts)]
        times = [pq.read_table(file, columns=["written"])["written"].to_pylist() for file in files]
        return max(filter(None, chain.from_iterable(times)), default=None)

    def _count(self) -> None:
        """Count this writer's parts."""
        self._number = next_number(self._parts, self._worker)
        live = live_parts(self._parts)
        self._single = sum(part.worker == self._worker and not part.is_compacted for part in live)

    def _compact(self, workers: Collection[str]) -> None:
        """Merge the single parts of these writers, if there are several, to one.

        A run needs no compaction, so one that meets damage is left for later.
        """
        self._set_damaged_aside()
        sweep(self._parts)
        single = [p for p in live_parts(self._parts) if p.worker in workers and not p.is_compacted]
        try:
            if len(single) > 1:
                merge_parts(self._parts, single, self._worker)
            self._count()
        except (pa.ArrowException, OSError) as error:
            if not is_damage(error):
                raise
            self._warn(f"the log of run {self._run.run_id} is not compacted: {error_line(error)}")
            self._single = 0

    def _clear_parts(self) -> None:
        """Remove replaced parts, and leftovers of killed writers."""
        sweep(self._parts)
        remove_leftovers(self.directory)
