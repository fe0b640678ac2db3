"""The database of a finished log, written from parts and other databases; it is never changed afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import duckdb

from srl.files import aside
from srl.store.database import attach, create_empty, create_runs, create_views, scan
from srl.store.older import union
from srl.store.parts import FINISHED, PARTS_DIRECTORY, live_parts
from srl.store.schema import BESIDE, PARTS, TABLES

MEMORY = "2GB"
"""Of written blocks DuckDB keeps no more in memory; it would fill most of the machine's with a large log."""


def write_database(
    path: Path, run: Mapping[str, object], logs: Sequence[Path], leave_out: str = "false"
) -> None:
    """Write the tables of `logs` to a new database at `path`, with the row `run` of the table `runs`.

    Of trajectories that satisfy the SQL condition `leave_out` on run_id, step and phase nothing is kept but
    the rows of `steps`.
    """
    with duckdb.connect(path.absolute()) as connection:
        connection.execute(f"SET memory_limit = '{MEMORY}'; SET enable_progress_bar = false")
        connection.execute("CREATE SCHEMA raw")
        sources = [_source(connection, log, f"log{place}") for place, log in enumerate(logs)]
        for table in PARTS:
            create_empty(connection, table)
            kept = "" if table == "steps" else f"WHERE NOT ({leave_out})"
            if found := [sql for sql in (source(table) for source in sources) if sql]:
                known = ", ".join(f'"{name}"' for name in PARTS[table].names)
                rows = f"SELECT {known} FROM ({union(table, found)}) {kept}"
                connection.execute(f"INSERT INTO raw.{table} BY NAME {rows}")
        create_runs(connection, [run])
        create_views(connection, [table for table in TABLES if table not in BESIDE])
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _source(connection: duckdb.DuckDBPyConnection, log: Path, name: str) -> Callable[[str], str]:
    """A function that gives SQL for a table of `log`, empty if it has no parts; attached as `name`."""
    if (log / FINISHED).exists():
        attach(connection, log / FINISHED, name)
        return lambda table: f"SELECT * FROM {name}.raw.{table}"
    parts = live_parts(log / PARTS_DIRECTORY)
    return lambda table: scan([part.file(table) for part in parts]) if parts else ""


@contextmanager
def replacing_database(log: Path) -> Iterator[Path]:
    """A path for a new database, which is the log's `log.duckdb` when the block ends without an error."""
    with aside(log / FINISHED) as written:
        yield written
        os.replace(written, log / FINISHED)
