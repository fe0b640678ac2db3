"""Trajectories as chat messages in Parquet, for fine-tuning elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.browse.filters import Condition
from srl.files import atomic_file
from srl.protocol import INFORMATION
from srl.store.batches import batches
from srl.trajectory import Search, Trajectory

ROLES = {"policy": "assistant", "observation": "tool", "feedback": "user"}
"""The role of what follows the prompt, by kind of segment."""

COLUMNS = (
    "run_id", "id", "step", "phase", "question_id", "question", "golden_answers", "data_source", "sample",
    "answer", "em", "f1", "reward", "verdict", "searches",
)  # fmt: skip
"""The columns of `trajectories` beside `messages`."""

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])


def write_messages(connection: duckdb.DuckDBPyConnection, chosen: Condition, out: Path) -> int:
    """Write the trajectories `chosen` to the Parquet file `out`; returns their number."""
    none = connection.sql(f"SELECT {', '.join(COLUMNS)} FROM trajectories LIMIT 0").fetch_arrow_table()
    schema = pa.schema([("messages", pa.list_(_MESSAGE)), *none.schema])
    count = 0
    with atomic_file(out, "wb") as file, pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for batch in batches(connection, *chosen, tokens=False):
            table = [
                {"messages": messages(record.trajectory)} | {name: row[name] for name in COLUMNS}
                for record, row in batch
            ]
            writer.write_batch(pa.RecordBatch.from_pylist(table, schema))
            count += len(table)
    return count


def messages(made: Trajectory) -> list[dict[str, str]]:
    """The prompt's messages, then one for each segment, with its text as it is."""
    rendered = "".join(one.text for one in made.segments if one.kind == "prompt")
    after = [one for one in made.segments if one.kind != "prompt"]
    said = [{"role": ROLES[one.kind], "content": one.text} for one in after]
    return with_passages(made.question.prompt or (), rendered) + said


def searches_of_prompt(made: Trajectory) -> tuple[Search, ...]:
    """The search that was made before the first turn, for a prompt with the passages (`{information}`)."""
    retrieved = any(INFORMATION in message["content"] for message in made.question.prompt or ())
    return tuple(made.searches[:1]) if retrieved else ()


def with_passages(prompt: Sequence[Mapping[str, str]], rendered: str) -> list[dict[str, str]]:
    """The prompt's messages with the passages that the policy read where a template says `{information}`.

    The log has the template's messages, and the prompt as it was rendered for the model: the passages are
    what stands there between the last information tags.
    """
    _, tag, after = rendered.rpartition("<information>")
    shown, end, _ = after.partition("</information>")
    read = f"{tag}{shown}{end}" if end else INFORMATION
    return [{**message, "content": message["content"].replace(INFORMATION, read, 1)} for message in prompt]
