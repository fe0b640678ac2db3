"""The log in DuckDB: tables `raw.*` over parts and finished logs, and the public views."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from srl.store.schema import PARTS, RESCORE_SCHEMA, RUN_SCHEMA, TABLES, WATCH_SCHEMA, Table, sql_type


def create_runs(connection: duckdb.DuckDBPyConnection, rows: Sequence[Mapping[str, Any]]) -> None:
    """Create `raw.runs` with these rows."""
    _create_table(connection, "runs", RUN_SCHEMA, rows)


def create_empty(connection: duckdb.DuckDBPyConnection, table: str) -> None:
    """Create `raw.<table>` without rows."""
    _create_table(connection, table, PARTS[table])


def create_rescores(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> None:
    """Create `raw.rescores` over these files."""
    if files:
        connection.execute(f"CREATE VIEW raw.rescores AS {scan(files)}")
    else:
        _create_table(connection, "rescores", RESCORE_SCHEMA)


def create_watches(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> None:
    """Create `raw.watches` with the rows of these files, which a sealed connection cannot open."""
    _create_table(connection, "watches", WATCH_SCHEMA)
    if files:
        connection.execute(f"INSERT INTO raw.watches BY NAME {scan(files)}")


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


def create_views(connection: duckdb.DuckDBPyConnection, tables: Sequence[Table] = TABLES) -> None:
    """Create the views of `tables`, with columns in documented order."""
    for table in tables:
        columns = ", ".join(f'"{column.name}"' for column in table.columns)
        connection.execute(f"CREATE VIEW {table.name} AS SELECT {columns} FROM ({table.sql})")


def scan(files: Sequence[Path]) -> str:
    """SQL that reads Parquet files in this order; a column that is missing in some is NULL there.

    A folder called `name=value` above them is a folder, and no column.
    """
    named = _list(map(_pattern, files))
    return f"SELECT * FROM read_parquet({named}, union_by_name = true, hive_partitioning = false)"


def _pattern(path: Path) -> str:
    """A path for `read_parquet`, with the wildcards `*`, `?` and `[` escaped."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in str(path))


def _list(texts: Iterable[object]) -> str:
    return f"[{', '.join(map(quoted, texts))}]"


def quoted(text: object) -> str:
    """An SQL string."""
    return "'" + str(text).replace("'", "''") + "'"


def attach(connection: duckdb.DuckDBPyConnection, path: Path, name: str) -> None:
    """Attach a finished log, which is never written again, as database `name`.

    The path is made absolute: of a relative one, DuckDB takes what is before a colon for an extension.
    """
    connection.execute(f"ATTACH {quoted(Path(path).absolute())} AS {name} (READ_ONLY)")


def seal(connection: duckdb.DuckDBPyConnection, directories: Sequence[Path], spill: Path) -> None:
    """Restrict queries permanently to files in `directories` and the attached databases.

    Data that exceeds memory goes to `spill`, a directory of this connection only: queries may open files in
    DuckDB's temporary directory, which would otherwise be `.tmp` in the current one. DuckDB can still write
    there if a query says so, so the caller must check the query.
    """
    allowed = [f"{path}/" for directory in directories for path in (directory, _pattern(directory))]
    connection.execute(f"SET temp_directory = {quoted(spill)}")
    connection.execute(f"SET allowed_directories = {_list(allowed)}")
    connection.execute("SET enable_external_access = false; SET lock_configuration = true")


def in_one_line(error: Exception) -> str:
    """The message of an error on one line, without DuckDB's excerpt of the query."""
    return " ".join(str(error).split("\n\nLINE ")[0].split())
