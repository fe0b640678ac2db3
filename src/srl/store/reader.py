"""Reads logs: one connection with the same tables for running and finished logs.

DuckDB refuses readers while a writer has its file open. So readers never open a file that is written: a
running log consists of immutable Parquet parts, and a finished one is a database opened read-only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any, TypeVar

import duckdb

from srl.errors import UserError
from srl.files import MANIFEST
from srl.store import run_info
from srl.store.damage import Damage, further_damage, left_out, lost_log, may_be_damage
from srl.store.database import (
    attach,
    create_empty,
    create_rescores,
    create_runs,
    create_views,
    create_watches,
    in_one_line,
    quoted,
    scan,
    seal,
)
from srl.store.older import union
from srl.store.parts import FINISHED, PARTS_DIRECTORY, Part, live_parts
from srl.store.rescores import DIRECTORY as RESCORES
from srl.store.rescores import rescore_files
from srl.store.schema import PARTS
from srl.store.watches import watch_file

T = TypeVar("T")
Warn = Callable[[str], None]
Damages = Mapping[Path, Damage]
"""The damage that is left out, by path."""

_logger = logging.getLogger(__name__)

_MOVED = (duckdb.IOException, FileNotFoundError)


class TooSlow(UserError):  # noqa: N818 - what is wrong with a query
    """A query was stopped at its limit of seconds."""


TRIES = 8
"""How often a log is read whose files the writer moves."""


def find_logs(path: Path | str) -> list[Path]:
    """The logs at `path`: a run's directory, its `log/`, a folder of runs, or a workspace."""
    path = Path(path)
    for log in (path, path / "log"):
        if run_info.has_log(log):
            return [log]
    return sorted(log for run in _children(path) if run_info.has_log(log := run / "log"))


def _children(path: Path) -> list[Path]:
    """The subdirectories that may be runs, in a folder of runs or a workspace."""
    folders = [folder for folder in (path, path / "runs") if folder.is_dir()]
    return [child for folder in folders for child in folder.iterdir()]


def _lost(path: Path | str) -> list[Damage]:
    """The runs at `path` whose log is missing."""
    path = Path(path)
    found = map(lost_log, [path, *sorted(_children(path))])
    return [damage for damage in found if damage]


def _once(logs: Iterable[Path]) -> list[Path]:
    """Each log once, however often it is named, and by whatever path."""
    return list({log.resolve(): log for log in logs}.values())


def copies_of_runs(logs: Sequence[Path], damaged: Collection[Path] = ()) -> dict[Path, Path]:
    """The logs that are copies of another one's run, each with the log that is read instead of it.

    That is one without damage, of several the one in the directory with the run's name, else the first. All
    tables name a run by its id, so a copy would add its rows to those of the run. Links to a log are the log
    itself.
    """
    found: dict[str, list[Path]] = {}
    for log in logs:
        with suppress(UserError, OSError):
            found.setdefault(str(run_info.load(log)["run"]["run_id"]), []).append(log)
    copies = dict[Path, Path]()
    for run_id, of_run in found.items():
        kept = min(of_run, key=lambda log: (log in damaged, log.parent.name != run_id))
        copies |= {log: kept for log in of_run if log.resolve() != kept.resolve()}
    return copies


def _copies_in_folders(paths: Sequence[Path | str], damaged: Collection[Path]) -> dict[Path, Path]:
    """Those among the logs of each path. Logs that are named one by one may be parts of one run."""
    copies = dict[Path, Path]()
    for path in paths:
        if len(logs := find_logs(path)) > 1:
            copies |= copies_of_runs(logs, damaged)
    return copies


def open_logs(*paths: Path | str, warn: Warn = _logger.warning) -> duckdb.DuckDBPyConnection:
    """A connection with the tables of `srl.store.schema.TABLES` over the logs at `paths`.

    It is a snapshot: open another connection to see later steps. It holds no locks, and can also read other
    files and write. Damaged parts and runs are left out, with a call of `warn`. Raises UserError if there is
    no readable log.
    """
    return _patiently(paths, lambda without, copies: _connect(paths, without, copies), warn)


def reading(
    paths: Sequence[Path | str],
    read: Callable[[duckdb.DuckDBPyConnection], T],
    *,
    warn: Warn = _logger.warning,
    sealed: bool = True,
    memory: str | None = None,
    seconds: float | None = None,
) -> T:
    """Return `read(connection)`; retried with a new connection if the writer compacted the log meanwhile.

    Damaged parts and runs are left out, with a call of `warn`. A `sealed` connection can open only files of
    the logs. DuckDB takes at most `memory`, such as "768MB", and spills what exceeds it; by default it keeps
    what it read of finished logs. With a limit of `seconds` it computes nothing while it plans a query, where
    no limit of memory and no interrupt holds. Raises TooSlow, and UserError if nothing can be read.
    """

    def once(without: Damages, copies: Collection[Path]) -> T:
        with (
            TemporaryDirectory(prefix="srl-", ignore_cleanup_errors=True) as spill,
            _connect(
                paths, without, copies, Path(spill) if sealed else None, memory, hasty=seconds is not None
            ) as connection,
        ):
            return _interruptible(connection, read, seconds)

    try:
        return _patiently(paths, once, warn)
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _patiently(
    paths: Sequence[Path | str], action: Callable[[Damages, Collection[Path]], T], warn: Warn
) -> T:
    """Return `action(without, copies)`; retried if the writer moved files meanwhile, then without damage."""
    without: dict[Path, Damage] = {}
    tries = TRIES
    while True:
        damaged = {damage.log for damage in without.values()}
        try:
            copies = _copies_in_folders(paths, damaged)
            done = action(without, copies.keys())
        except Exception as error:
            cause = error.__cause__ if isinstance(error.__cause__, duckdb.Error) else error
            if isinstance(cause, _MOVED) and tries > 1:
                tries -= 1
                continue
            logs = [log for path in paths for log in find_logs(path)]
            found = further_damage(logs, without) if _is_of_a_file(cause, logs) else {}
            if not found:
                raise
            without |= found
        else:
            for damage in [*(lost for path in paths for lost in _lost(path)), *without.values()]:
                warn(left_out(damage))
            for copy, log in copies.items():
                if copy not in damaged:
                    warn(f"{copy.parent} is left out: it is a copy of the run in {log.parent}")
            return done


def _is_of_a_file(error: BaseException, logs: Sequence[Path]) -> bool:
    """Whether an error may be of a damaged file. DuckDB has one type for that and for a fault in a query's
    expression; it names the file that it could not read."""
    names_none = not any(str(log) in str(error) for log in logs)
    return may_be_damage(error) and not (names_none and isinstance(error, duckdb.InvalidInputException))


def _interruptible(
    connection: duckdb.DuckDBPyConnection,
    read: Callable[[duckdb.DuckDBPyConnection], T],
    seconds: float | None,
) -> T:
    """Run `read(connection)` in a thread, so that Ctrl-C and the limit of `seconds` end a long query: DuckDB
    may not check for signals."""
    answer: Future[T] = Future()

    def work() -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(read(connection))
        except BaseException as error:
            answer.set_exception(error)

    try:
        Thread(target=work, daemon=True).start()
        if wait([answer], seconds).not_done:
            raise TooSlow(f"the query was stopped after {seconds:.0f} seconds")
        return answer.result()
    finally:
        while not (answer.cancel() or answer.done()):  # an interrupt between two statements is lost
            connection.interrupt()
            wait([answer], timeout=0.05)


def _connect(
    paths: Sequence[Path | str],
    without: Damages,
    copies: Collection[Path],
    spill: Path | None = None,
    memory: str | None = None,
    hasty: bool = False,
) -> duckdb.DuckDBPyConnection:
    """A connection over the logs at `paths` but `copies`; sealed if there is a directory to `spill` to."""
    logs = _once(log for path in paths for log in existing_logs(path))
    logs = [log for log in logs if log not in copies]
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": "false", "arrow_lossless_conversion": "true"}
    )
    try:
        if hasty:
            connection.execute("SET disabled_optimizers = 'expression_rewriter,statistics_propagation'")
        if memory:
            connection.execute(f"SET memory_limit = {quoted(memory)}")
        _create_tables(connection, logs, without)
        if spill:
            seal(connection, [log / name for log in logs for name in (PARTS_DIRECTORY, RESCORES)], spill)
    except BaseException:
        connection.close()
        raise
    return connection


def existing_logs(path: Path | str) -> list[Path]:
    """The logs at `path`, as `find_logs`. Raises UserError if there are none."""
    logs = find_logs(path)
    if not logs and (lost := _lost(path)):
        raise UserError("; ".join(map(str, lost)))
    if not logs:
        raise UserError(f"no log in {path}: expected a run or a folder of runs; start one with `srl train`")
    return logs


def _create_tables(connection: duckdb.DuckDBPyConnection, logs: Sequence[Path], without: Damages) -> None:
    """Create the log's tables over all readable files. Raises UserError if there are none."""
    connection.execute("SET enable_progress_bar = false; CREATE SCHEMA raw")
    parts: list[Part] = []
    finished: list[str] = []
    rows: list[dict[str, Any]] = []
    rescores: list[Path] = []
    watches: list[Path] = []
    for log in logs:
        if without.keys() & {log / MANIFEST, log / FINISHED}:
            continue
        left = [] if (log / FINISHED).exists() else live_parts(log / PARTS_DIRECTORY, without.keys())
        if not left and not (log / FINISHED).exists():  # perhaps it was reopened since the first look
            left = live_parts(log / PARTS_DIRECTORY, without.keys())
        if not left and (log / FINISHED).exists():  # perhaps only since the look at the parts
            finished.append(f"log{len(finished)}")
            attach(connection, log / FINISHED, finished[-1])
        elif not left and any(damage.log == log for damage in without.values()):
            continue
        parts += left
        rows.append(run_info.run_row(log))
        rescores += [file for file in rescore_files(log) if file not in without]
        watches += [file for file in [watch_file(log)] if file.is_file() and file not in without]
    if not rows:
        raise UserError("; ".join(damage.why for damage in without.values()))
    create_runs(connection, rows)
    for table in PARTS:
        _create_table(connection, table, parts, finished)
    create_rescores(connection, rescores)
    create_watches(connection, watches)
    create_views(connection)


def _create_table(
    connection: duckdb.DuckDBPyConnection, table: str, parts: Sequence[Part], finished: Sequence[str]
) -> None:
    sources = [scan([part.file(table) for part in parts])] if parts else []
    sources += [f"SELECT * FROM {database}.raw.{table}" for database in finished]
    if sources:
        connection.execute(f"CREATE VIEW raw.{table} AS {union(table, sources)}")
    else:
        create_empty(connection, table)
