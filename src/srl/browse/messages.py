"""Trajectories in batches for other programs, and as chat messages in Parquet, for fine-tuning elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.browse.trajectories import Filter
from srl.errors import UserError
from srl.files import atomic_file
from srl.store import Record, read_with_rows
from srl.trajectory import Trajectory

SIZE = 1000
"""The most trajectories that are in memory at a time."""

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


@dataclass(frozen=True, slots=True)
class Batch:
    """Trajectories of one run, phase and step in the order written, each with its row of `trajectories`.

    Their segments have texts alone, without tokens. `number` counts the batches of the step, from 1.
    """

    run_id: str
    phase: str
    step: int
    number: int
    pairs: list[tuple[Record, dict[str, Any]]]


def batches(connection: duckdb.DuckDBPyConnection, chosen: Filter, size: int = SIZE) -> Iterator[Batch]:
    """The trajectories `chosen` by run, phase and step, at most `size` at a time.

    Raises UserError if nothing is chosen.
    """
    where, parameters = chosen.where()
    place = "run_id, phase, step"
    query = f"SELECT DISTINCT {place} FROM trajectories WHERE {where} ORDER BY {place}"
    found = connection.execute(query, parameters).fetchall()
    if not found:
        raise UserError("no matching trajectory; nothing is written; try fewer filters")
    for run_id, phase, step in found:
        here = f"({where}) AND run_id = ? AND phase = ? AND step = ?"
        query = f"SELECT id FROM trajectories WHERE {here} ORDER BY position, id"
        ids = [one for (one,) in connection.execute(query, [*parameters, run_id, phase, step]).fetchall()]
        for number, start in enumerate(range(0, len(ids), size), start=1):
            some = ids[start : start + size]
            yield Batch(run_id, phase, step, number, _pairs(connection, (run_id, phase, step), some))


def _pairs(
    connection: duckdb.DuckDBPyConnection, place: tuple[str, str, int], ids: list[str]
) -> list[tuple[Record, dict[str, Any]]]:
    where = "run_id = ? AND phase = ? AND step = ? AND list_contains(?, id)"
    return read_with_rows(connection, where, [*place, ids], tokens=False)


def write_messages(connection: duckdb.DuckDBPyConnection, chosen: Filter, out: Path) -> int:
    """Write the trajectories `chosen` to the Parquet file `out`; returns their number.

    Raises UserError if nothing is chosen.
    """
    count = 0
    with atomic_file(out, "wb") as file, pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        for batch in batches(connection, chosen):
            lines = [row | {"messages": messages(record.trajectory)} for record, row in batch.pairs]
            writer.write_table(pa.Table.from_pylist(lines, SCHEMA))
            count += len(lines)
    return count
