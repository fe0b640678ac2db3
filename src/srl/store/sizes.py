"""How many rows and bytes each table of a log has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.errors import UserError
from srl.store import run_info
from srl.store.database import attach, in_one_line
from srl.store.parts import FINISHED, PARTS_DIRECTORY, live_parts
from srl.store.reader import TRIES
from srl.store.rescores import DIRECTORY as RESCORES
from srl.store.rescores import rescore_files
from srl.store.schema import PARTS
from srl.store.watches import watch_file

OTHER = "other"
"""Parts that another replaced, damaged files, and what belongs to no table."""


@dataclass(frozen=True, slots=True)
class Size:
    """The `rows` of a table, None where they are not counted, and its bytes on disk."""

    table: str
    rows: int | None
    bytes: int


def sizes(log: Path) -> list[Size]:
    """The tables of a log on disk, and `other` for the rest; the sum is what the directory takes.

    The rows of a damaged file are not counted. In a finished log a block that two tables share counts for
    the first of them. Counted once more if the writer replaced a part meanwhile. Raises UserError for a
    database that cannot be read, and for a log of a newer srl.
    """
    for _ in range(TRIES - 1):
        try:
            return _sizes(log)
        except FileNotFoundError:
            continue
    return _sizes(log)


def _sizes(log: Path) -> list[Size]:
    run_info.load(log)
    tables = _of_database(log / FINISHED) if (log / FINISHED).exists() else _of_parts(log)
    beside = {RESCORES: rescore_files(log), "watches": [file for file in [watch_file(log)] if file.is_file()]}
    tables += [Size(name, _rows(files), _bytes(files)) for name, files in beside.items() if files]
    rest = _bytes(log.rglob("*")) - sum(size.bytes for size in tables)
    return [*tables, Size(OTHER, None, max(rest, 0))]


def _of_parts(log: Path) -> list[Size]:
    parts = live_parts(log / PARTS_DIRECTORY, strict=False)
    files = {table: [part.file(table) for part in parts] for table in PARTS}
    return [Size(table, _rows(found), _bytes(found)) for table, found in files.items()]


def _rows(files: list[Path]) -> int:
    return sum(map(_rows_of, files))


def _rows_of(file: Path) -> int:
    """The rows of a Parquet file, by its metadata; none of a damaged one."""
    try:
        return int(pq.read_metadata(file).num_rows)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # such as a file that has gone
            raise
        return 0


def _bytes(files: Iterable[Path]) -> int:
    return sum(file.lstat().st_size for file in files if file.is_file())


def _of_database(path: Path) -> list[Size]:
    try:
        with duckdb.connect() as connection:
            attach(connection, path, "log")
            return list(_tables(connection))
    except duckdb.Error as error:
        raise UserError(f"{path}: {in_one_line(error)}") from error


def _tables(connection: duckdb.DuckDBPyConnection) -> Iterator[Size]:
    query = "SELECT block_size FROM pragma_database_size() WHERE database_name = 'log'"
    [(block,)] = connection.execute(query).fetchall()
    seen: set[int] = set()
    for table in PARTS:
        [(rows,)] = connection.execute(f"SELECT count(*) FROM log.raw.{table}").fetchall()
        mine = _blocks(connection, table) - seen
        seen |= mine
        yield Size(table, rows, len(mine) * block)


def _blocks(connection: duckdb.DuckDBPyConnection, table: str) -> set[int]:
    """The blocks of a table; a value that fits into none has more of them."""
    found = connection.execute(
        "SELECT block_id FROM pragma_storage_info($name) WHERE block_id >= 0 "
        "UNION SELECT unnest(additional_block_ids) FROM pragma_storage_info($name)",
        {"name": f"log.raw.{table}"},
    )
    return {block for (block,) in found.fetchall()}
