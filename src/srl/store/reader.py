"""Reads logs, running or finished: one connection over the immutable parts of all of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TypeVar

import duckdb
import pyarrow as pa

from srl.errors import UserError
from srl.files import MANIFEST, DamagedError
from srl.store import run_info
from srl.store.database import create_tables, in_one_line, quoted, scan, seal
from srl.store.parts import PARTS_DIRECTORY, damaged_parts, live_parts
from srl.store.schema import PARTS

T = TypeVar("T")
Warn = Callable[[str], None]
LeftOut = Mapping[Path, str]
"""The damaged parts and manifests that are not read, each with a warning."""

TRIES = 8
"""How often a log is read whose files the writer moves."""

_OF_A_QUERY = (
    UserError, duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.DataError
)  # fmt: skip
"""Errors that no damaged file causes."""

_logger = logging.getLogger(__name__)


class TooSlow(UserError):  # noqa: N818 - what is wrong with a query
    """A query was stopped at its limit of seconds."""


def find_logs(path: Path | str) -> list[Path]:
    """The logs at `path`: a run's directory, its `log/`, a folder of runs, or a workspace."""
    path = Path(path)
    for log in (path, path / "log"):
        if run_info.has_log(log):
            return [log]
    folders = [folder for folder in (path, path / "runs") if folder.is_dir()]
    return sorted(child / "log" for folder in folders for child in folder.iterdir()
                  if run_info.has_log(child / "log"))  # fmt: skip


def existing_logs(path: Path | str) -> list[Path]:
    """The logs at `path`, as `find_logs`. Raises UserError if there are none."""
    logs = find_logs(path)
    if not logs:
        raise UserError(
            f"no log in {path}", hint="expected a run or a folder of runs; start one with `srl train`"
        )
    return logs


def open_logs(*paths: Path | str, warn: Warn = _logger.warning) -> duckdb.DuckDBPyConnection:
    """A connection with the tables of `srl.store.schema.TABLES` over the logs at `paths`.

    It is a snapshot: open another connection to see later steps. It holds no locks, and can also read other
    files and write. Damaged parts and runs are left out, with a call of `warn`. Raises UserError if there is
    no readable log. Logs of one run that are named one by one, as from several machines, are read as one.
    """
    return _patiently(paths, _connect, warn, check=True)


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
    the logs. DuckDB takes at most `memory`, such as "768MB", and spills what exceeds it. With a limit of
    `seconds` it computes nothing while it plans a query, where no limit of memory and no interrupt holds.
    Raises TooSlow, and UserError if nothing can be read.
    """

    def once(logs: Sequence[Path], left_out: LeftOut) -> T:
        with (
            TemporaryDirectory(prefix="srl-", ignore_cleanup_errors=True) as spill,
            _connect(logs, left_out, Path(spill) if sealed else None, memory, seconds) as connection,
        ):
            return _interruptible(connection, read, seconds)

    try:
        return _patiently(paths, once, warn)
    except duckdb.Error as error:
        raise UserError(in_one_line(error)) from error


def _patiently(
    paths: Sequence[Path | str],
    action: Callable[[Sequence[Path], LeftOut], T],
    warn: Warn,
    *,
    check: bool = False,
) -> T:
    """Return `action(logs, left_out)`; retried if the writer moved files meanwhile, and without damage.

    Damage is looked for after an error, or first with `check`, as DuckDB opens most files only in a query.
    """
    left_out: dict[Path, str] = {}
    tries = TRIES
    while True:
        logs = _logs(paths)
        try:
            if check:
                left_out |= _damage(logs)
            result = action(logs, left_out)
        except (UserError, duckdb.Error, pa.ArrowException, OSError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, duckdb.Error) else error
            if isinstance(cause, _OF_A_QUERY) and not isinstance(cause, DamagedError):
                raise
            damage = _damage(logs)
            tries -= 1
            if damage.keys() - left_out.keys():
                left_out |= damage
            elif tries == 0 or not isinstance(cause, duckdb.IOException | FileNotFoundError):
                raise
        else:
            for message in left_out.values():
                warn(message)
            return result


def _logs(paths: Sequence[Path | str]) -> list[Path]:
    """The logs at `paths`, each once by whatever path."""
    return list({log.resolve(): log.absolute() for path in paths for log in existing_logs(path)}.values())


def _damage(logs: Sequence[Path]) -> dict[Path, str]:
    """The files of logs that cannot be read by what they say of themselves, each with a warning."""
    damage: dict[Path, str] = {}
    for log in logs:
        try:
            run = run_info.load(log)["run"]["run_id"]
        except DamagedError as error:
            damage[log / MANIFEST] = f"run {log.parent.name}: all is left out: {error}"
            continue
        for part, fault in damaged_parts(log / PARTS_DIRECTORY).items():
            damage[part.path] = f"run {run}: {part} is left out: {fault}"
    return damage


def _connect(
    logs: Sequence[Path],
    left_out: LeftOut,
    spill: Path | None = None,
    memory: str | None = None,
    seconds: float | None = None,
) -> duckdb.DuckDBPyConnection:
    """A connection over these logs; sealed if there is a directory to `spill` to.

    Raises UserError if none of them can be read.
    """
    readable = [log for log in logs if log / MANIFEST not in left_out]
    if not readable:
        raise UserError("; ".join(left_out.values()))
    parts = [part for log in readable for part in live_parts(log / PARTS_DIRECTORY, left_out.keys())]
    sources = {table: scan([part.file(table) for part in parts]) for table in PARTS if parts}
    connection = duckdb.connect(
        config={"autoinstall_known_extensions": "false", "arrow_lossless_conversion": "true"}
    )
    try:
        connection.execute("SET enable_progress_bar = false")
        if seconds is not None:
            connection.execute("SET disabled_optimizers = 'expression_rewriter,statistics_propagation'")
        if memory:
            connection.execute(f"SET memory_limit = {quoted(memory)}")
        create_tables(connection, readable, sources)
        if spill:
            seal(connection, readable, spill)
    except BaseException:
        connection.close()
        raise
    return connection


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
