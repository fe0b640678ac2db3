"""Trajectories in batches for other programs, and as chat messages in Parquet, for fine-tuning elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.browse.trajectories import Filter
from srl.errors import UserError
from srl.files import atomic_file
from srl.protocol import INFORMATION
from srl.store import Record, read_with_rows
from srl.trajectory import Search, Trajectory

SIZE = 1000
"""The most trajectories that are in memory at a time."""

ROLES: Mapping[str, str] = {"policy": "assistant", "observation": "tool", "feedback": "user"}
"""The role of what follows the prompt, by kind of segment."""

COLUMNS = (
    "run_id", "id", "step", "phase", "question_id", "question", "golden_answers", "data_source", "sample",
    "answer", "em", "f1", "reward", "verdict", "searches",
)  # fmt: skip
"""The columns of `trajectories` beside `messages`."""

_CHOSEN = "run_id = ? AND phase = ? AND step = ? AND {} IN (SELECT unnest(?))"
_MESSAGES = f"""
SELECT from_json(prompt, '[{{"role": "VARCHAR", "content": "VARCHAR"}}]') || coalesce(said, []) AS messages,
    {", ".join(COLUMNS)}, CASE WHEN contains(prompt, '{INFORMATION}') THEN rendered END AS rendered
FROM trajectories LEFT JOIN (
    SELECT trajectory_id AS id, first(text) AS rendered
    FROM segments WHERE kind = 'prompt' AND {_CHOSEN.format("trajectory_id")} GROUP BY id
) USING (id) LEFT JOIN (
    SELECT trajectory_id AS id, list({{
        'role': CASE kind {" ".join(f"WHEN '{kind}' THEN '{role}'" for kind, role in ROLES.items())} END,
        'content': text
    }} ORDER BY position) AS said
    FROM segments WHERE kind <> 'prompt' AND {_CHOSEN.format("trajectory_id")} GROUP BY id
) USING (id)
WHERE {_CHOSEN.format("id")} ORDER BY position, id
"""
"""The prompt's messages, then one for each segment, with its text as it is."""


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


def batches(connection: duckdb.DuckDBPyConnection, chosen: Filter) -> Iterator[Batch]:
    """The trajectories `chosen` by run, phase and step, at most `SIZE` at a time.

    Raises UserError if nothing is chosen.
    """
    for place, number, ids in _chunks(connection, chosen):
        pairs = read_with_rows(connection, _CHOSEN.format("id"), [*place, ids], tokens=False)
        yield Batch(*place, number, pairs)


_Place = tuple[str, str, int]
"""A run, a phase and a step."""


def _chunks(connection: duckdb.DuckDBPyConnection, chosen: Filter) -> Iterator[tuple[_Place, int, list[str]]]:
    """The ids of the trajectories `chosen`, at most `SIZE` at a time: their place, the chunk's number, ids.

    Raises UserError if nothing is chosen.
    """
    where, parameters = chosen.where()
    query = f"SELECT DISTINCT run_id, phase, step FROM trajectories WHERE {where} ORDER BY ALL"
    places = connection.execute(query, parameters).fetchall()
    if not places:
        raise UserError("no matching trajectory, so nothing is written", hint="try fewer filters")
    for place in places:
        here = f"({where}) AND run_id = ? AND phase = ? AND step = ?"
        query = f"SELECT id FROM trajectories WHERE {here} ORDER BY position, id"
        ids = [one for (one,) in connection.execute(query, [*parameters, *place]).fetchall()]
        for number, start in enumerate(range(0, len(ids), SIZE), start=1):
            yield place, number, ids[start : start + SIZE]


def write_messages(connection: duckdb.DuckDBPyConnection, chosen: Filter, out: Path) -> int:
    """Write the trajectories `chosen` to the Parquet file `out`; returns their number.

    Raises UserError if nothing is chosen.
    """
    count = 0
    with atomic_file(out, "wb") as file, ExitStack() as stack:
        writer: pq.ParquetWriter | None = None
        for place, _, ids in _chunks(connection, chosen):
            reader = connection.sql(_MESSAGES, params=[*place, ids] * 3).fetch_arrow_reader(SIZE)
            schema = reader.schema.remove(reader.schema.get_field_index("rendered"))
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(file, schema, compression="zstd"))
            for batch in reader:
                writer.write_batch(_as_read(batch, schema))
                count += batch.num_rows
    return count


def _as_read(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """The batch without its column `rendered`, which says what the policy read where passages stand in a
    prompt."""
    if batch["rendered"].null_count == batch.num_rows:
        return batch.select(schema.names)
    rows = batch.to_pylist()
    for row in rows:
        if rendered := row.pop("rendered"):
            row["messages"] = with_passages(row["messages"], rendered)
    return pa.RecordBatch.from_pylist(rows, schema)


def searches_of_prompt(made: Trajectory) -> tuple[Search, ...]:
    """The search that was made before the first turn, for a prompt with the passages (`{information}`)."""
    retrieved = any(INFORMATION in message["content"] for message in made.question.prompt or ())
    return tuple(made.searches[:1]) if retrieved else ()


def with_passages(messages: Sequence[Mapping[str, str]], rendered: str) -> list[dict[str, str]]:
    """The prompt's messages with the passages that the policy read where a template says `{information}`.

    The log has the template's messages, and the prompt as it was rendered for the model: the passages are
    what stands there between the last information tags.
    """
    _, tag, after = rendered.rpartition("<information>")
    shown, end, _ = after.partition("</information>")
    if not end:
        return [dict(message) for message in messages]
    read = f"{tag}{shown}{end}"
    return [{**message, "content": message["content"].replace(INFORMATION, read, 1)} for message in messages]
