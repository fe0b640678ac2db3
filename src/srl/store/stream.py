"""Reads the trajectories of a log of any size in batches, with the memory of one batch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import duckdb
import pyarrow as pa

from srl.errors import UserError
from srl.store.records import Row, trajectory_of
from srl.store.schema import PER_TOKEN
from srl.trajectory import Trajectory

_ROWS = 1024


def read_trajectories(connection: duckdb.DuckDBPyConnection, size: int) -> Iterator[list[Trajectory]]:
    """The trajectories of a log (`srl.store.open`) in the order written, at most `size` at a time.

    The tables are read side by side: each part has the rows of its trajectories in the same order, and
    DuckDB keeps the order of rows. Raises UserError where a table has rows of no trajectory.
    """
    segments, searches = (_Children(connection, table) for table in ("segments", "searches"))
    rows = _rows(connection, "trajectories")
    while batch := list(islice(rows, size)):
        yield [trajectory_of(row, segments.of(row), searches.of(row)) for row in batch]
    segments.check_read()
    searches.check_read()


class _Children:
    """The rows of a table, taken trajectory by trajectory."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, table: str) -> None:
        self.table, self._rows = table, _rows(connection, table)
        self._next = next(self._rows, None)

    def of(self, trajectory: Row) -> list[Row]:
        """The rows of the next trajectory."""
        found, key = [], (trajectory["run_id"], trajectory["id"])
        while self._next is not None and (self._next["run_id"], self._next["trajectory_id"]) == key:
            found.append(self._next)
            self._next = next(self._rows, None)
        return found

    def check_read(self) -> None:
        if self._next is not None:
            raise UserError(
                f"the log is damaged: {self.table} of the trajectory {self._next['trajectory_id']} have no "
                "trajectory, or are in another order"
            )


def _rows(connection: duckdb.DuckDBPyConnection, table: str) -> Iterator[Row]:
    """The rows of `raw.<table>` in their order, without what training computed for the tokens."""
    left_out = f"EXCLUDE ({', '.join(PER_TOKEN)})" if table == "segments" else ""
    reader = connection.cursor().sql(f"SELECT * {left_out} FROM raw.{table}").fetch_arrow_reader(_ROWS)
    for batch in reader:
        columns = [_values(column) for column in batch.columns]
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    """The values of a column. Lists of numbers go through numpy, which is many times faster."""
    if not pa.types.is_list(column.type) or not pa.types.is_primitive(column.type.value_type):
        return column.to_pylist()
    ends, numbers = column.offsets.to_pylist(), column.values.to_numpy(zero_copy_only=False)
    present = column.is_valid().to_pylist()
    return [
        numbers[start:end].tolist() if there else None
        for start, end, there in zip(ends, ends[1:], present, strict=False)
    ]
