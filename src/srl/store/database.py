"""The log in DuckDB: tables `raw.*` over the files on disk, the public views, and the catalogue of a log."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from srl.errors import UserError
from srl.files import MANIFEST, aside
from srl.store import run_info
from srl.store.parts import PARTS_DIRECTORY, REPLACES, all_parts
from srl.store.schema import PARTS, RUN_SCHEMA, TABLES, WATCH_SCHEMA, sql_type

CATALOGUE = "log.duckdb"

_LIVE = """
SELECT * EXCLUDE (filename)
FROM read_parquet('{glob}/{table}.parquet', filename = true, hive_partitioning = false)
WHERE parse_path(filename)[-2] NOT IN (
    SELECT unnest(string_split(decode(value), ' '))
    FROM parquet_kv_metadata('{glob}/steps.parquet') WHERE key = '{key}'
)
"""
"""The rows of a table in whatever parts there are when it is read, each once."""


def create_tables(
    connection: duckdb.DuckDBPyConnection,
    logs: Sequence[Path],
    sources: Mapping[str, str],
) -> None:
    """Create all tables of these logs, with the SQL that reads each table of `PARTS`, if there are files."""
    connection.execute("CREATE SCHEMA raw")
    _create_table(connection, "runs", RUN_SCHEMA, [run_info.run_row(log) for log in logs])
    fired = [row for log in logs for row in run_info.watch_rows(log)]
    _create_table(connection, "watches", WATCH_SCHEMA, fired)
    for name, schema in PARTS.items():
        if source := sources.get(name):
            connection.execute(f"CREATE VIEW raw.{name} AS {source}")
        else:
            _create_table(connection, name, schema)
    for table in TABLES:
        columns = ", ".join(f'"{column.name}"' for column in table.columns)
        connection.execute(f"CREATE VIEW {table.name} AS SELECT {columns} FROM ({table.sql})")


def _create_table(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    schema: pa.Schema,
    rows: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Create `raw.<name>` with few rows; by SQL, since Arrow's way from Python's objects imports pandas."""
    columns = ", ".join(f'"{field.name}" {sql_type(field.type)}' for field in schema)
    connection.execute(f"CREATE TABLE raw.{name} ({columns})")
    places = ", ".join("?" * len(schema))
    for row in rows:
        values = [row.get(field.name) for field in schema]
        connection.execute(f"INSERT INTO raw.{name} VALUES ({places})", values)


def write_catalogue(log: Path) -> None:
    """Write `log.duckdb`: the tables of a log for any DuckDB client, as views over whatever parts there are.

    Nothing is written where there are none. The paths in it are absolute.
    """
    log = log.absolute()
    parts = log / PARTS_DIRECTORY
    if not all_parts(parts):
        return
    glob = f"{_pattern(parts)}/step*".replace("'", "''")
    with aside(log / CATALOGUE) as path:
        with duckdb.connect(path) as connection:
            sources = {table: _LIVE.format(table=table, glob=glob, key=REPLACES) for table in PARTS}
            create_tables(connection, [log], sources)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        os.replace(path, log / CATALOGUE)


def refresh_catalogue(log: Path) -> None:
    """Write the catalogue of a log anew if it is not of this place (a run that was moved or copied), or older
    than its manifest. In a place that cannot be written it stays as it is."""
    log = log.absolute()
    file = log / CATALOGUE
    with suppress(UserError, OSError):
        try:
            with duckdb.connect(file, read_only=True) as connection:
                places = connection.execute("SELECT path FROM raw.runs").fetchall()
        except duckdb.Error:  # there is none, or it is damaged
            places = []
        written = file.stat().st_mtime if places == [(str(log),)] else 0.0
        if (log / MANIFEST).stat().st_mtime > written:
            write_catalogue(log)


def scan(files: Sequence[Path]) -> str:
    """SQL that reads Parquet files in this order, "" if there are none. A folder called `name=value` above
    them is no column."""
    if not files:
        return ""
    return f"SELECT * FROM read_parquet({_list(map(_pattern, files))}, hive_partitioning = false)"


def _pattern(path: Path) -> str:
    """A path for `read_parquet`, with the wildcards `*`, `?` and `[` escaped."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _list(texts: Iterable[object]) -> str:
    return f"[{', '.join(map(quoted, texts))}]"


def quoted(text: object) -> str:
    """An SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def seal(connection: duckdb.DuckDBPyConnection, directories: Sequence[Path], spill: Path) -> None:
    """Restrict queries permanently to files in `directories`.

    Data that exceeds memory goes to `spill`, a directory of this connection only: queries may open files in
    DuckDB's temporary directory, which would otherwise be `.tmp` in the current one. DuckDB can still write
    there if a query says so, so the caller must check the query.
    """
    patterns = [f"{path}/" for directory in directories for path in (directory, _pattern(directory))]
    connection.execute(f"SET temp_directory = {quoted(spill)}")
    connection.execute(f"SET allowed_directories = {_list(patterns)}")
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")


def in_one_line(error: Exception) -> str:
    """The message of an error on one line, without DuckDB's excerpt of the query."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())
