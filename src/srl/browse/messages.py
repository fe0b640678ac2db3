"""Trajectories as chat messages in Parquet, for fine-tuning elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.browse.trajectories import Filter
from srl.errors import UserError
from srl.files import atomic_file
from srl.store import read_records, rows
from srl.trajectory import Trajectory

ROLES: Mapping[str, str] = {"policy": "assistant", "observation": "tool", "feedback": "user"}
"""The role of what follows the prompt, by kind of segment."""

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
SCHEMA = pa.schema(
    [
        ("messages", pa.list_(_MESSAGE)), ("run_id", pa.string()), ("id", pa.string()), ("step", pa.int32()),
        ("phase", pa.string()), ("question_id", pa.string()), ("question", pa.string()),
        ("golden_answers", pa.list_(pa.string())), ("data_source", pa.string()), ("sample", pa.int32()),
        ("answer", pa.string()), ("em", pa.float64()), ("f1", pa.float64()), ("reward", pa.float64()),
        ("verdict", pa.string()), ("searches", pa.int32()),
    ]
)  # fmt: skip
"""`messages` and the columns of `trajectories` beside them."""


def messages(trajectory: Trajectory) -> list[dict[str, str]]:
    """The prompt's messages, then one for each segment, with its text as it is."""
    prompt = [dict(message) for message in trajectory.question.prompt]
    return prompt + [
        {"role": ROLES[segment.kind], "content": segment.text}
        for segment in trajectory.segments
        if segment.kind != "prompt"
    ]


def write_messages(connection: duckdb.DuckDBPyConnection, chosen: Filter, out: Path) -> int:
    """Write the trajectories `chosen` to the Parquet file `out`, step by step; returns their number.

    Raises UserError if nothing is chosen.
    """
    count = 0
    with atomic_file(out, "wb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for table in _tables(connection, chosen):
            writer.write_table(table)
            count += table.num_rows
        if not count:
            raise UserError("no matching trajectory; nothing is written; try fewer filters")
    return count


def _tables(connection: duckdb.DuckDBPyConnection, chosen: Filter) -> Iterator[pa.Table]:
    where, parameters = chosen.where()
    query = f"SELECT DISTINCT run_id, phase, step FROM trajectories WHERE {where} ORDER BY ALL"
    beside = ", ".join(f'"{name}"' for name in SCHEMA.names[1:])
    for place in rows(connection, query, parameters):
        here = f"({where}) AND run_id = ? AND phase = ? AND step = ?"
        given = [*parameters, *place.values()]
        records = read_records(connection, here, given)
        found = rows(connection, f"SELECT {beside} FROM trajectories WHERE {here} ORDER BY position", given)
        yield pa.Table.from_pylist(
            [_row(record.trajectory, row) for record, row in zip(records, found, strict=True)], SCHEMA
        )


def _row(trajectory: Trajectory, row: dict[str, Any]) -> dict[str, Any]:
    return {"messages": messages(trajectory), **row}
