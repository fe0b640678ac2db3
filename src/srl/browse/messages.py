"""Trajectories as chat messages in Parquet, for fine-tuning elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from srl.browse.filters import Condition
from srl.files import atomic_file
from srl.protocol import FORMATS, INFORMATION, opens_thought, shown_result
from srl.rollout.documents import FindCall, OpenCall
from srl.rollout.protocol import SearchCall, schema, search_parameters
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
_FUNCTION = pa.struct([("name", pa.string()), ("arguments", pa.string())])
_CALL = pa.struct([("id", pa.string()), ("type", pa.string()), ("function", _FUNCTION)])
_MESSAGE_WITH_CALLS = pa.struct(
    [*_MESSAGE, ("reasoning_content", pa.string()), ("tool_calls", pa.list_(_CALL)),
     ("tool_call_id", pa.string()), ("name", pa.string())]
)  # fmt: skip


def write_messages(connection: duckdb.DuckDBPyConnection, condition: Condition, out: Path) -> int:
    """Write the trajectories that satisfy `condition` to the Parquet file `out`; returns their number."""
    none = connection.sql(f"SELECT {', '.join(COLUMNS)} FROM trajectories LIMIT 0").fetch_arrow_table()
    where, parameters = condition
    query = f"SELECT 1 FROM trajectories WHERE ({where}) AND protocol <> 'tags' LIMIT 1"
    if connection.execute(query, parameters).fetchone():
        columns = [("messages", pa.list_(_MESSAGE_WITH_CALLS)), ("tools", pa.string())]
    else:
        columns = [("messages", pa.list_(_MESSAGE))]
    rows_schema = pa.schema([*columns, *none.schema])
    count = 0
    with atomic_file(out, "wb") as file, pq.ParquetWriter(file, rows_schema, compression="zstd") as writer:
        for batch in batches(connection, *condition, tokens=False):
            table = [
                {"messages": messages(record.trajectory), "tools": declared(record.trajectory)}
                | {name: row[name] for name in COLUMNS}
                for record, row in batch
            ]
            writer.write_batch(pa.RecordBatch.from_pylist(table, rows_schema))
            count += len(table)
    return count


def messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The prompt's messages, then one for each segment, with its text as it is; native calls and what they
    return are in OpenAI's form."""
    if trajectory.protocol != "tags":
        return [*map(dict, trajectory.question.prompt), *_with_calls(trajectory)]
    rendered = "".join(segment.text for segment in trajectory.segments if segment.kind == "prompt")
    after = [segment for segment in trajectory.segments if segment.kind != "prompt"]
    turns = [{"role": ROLES[segment.kind], "content": segment.text} for segment in after]
    return with_passages(trajectory.question.prompt or (), rendered) + turns


def _with_calls(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    inside_thought, form = trajectory.think_is_open, FORMATS[trajectory.protocol]
    for segment in trajectory.segments[1:]:
        results = [search for search in trajectory.searches if search.turn == segment.turn]
        ids = [f"call_{segment.turn}_{number}" for number in range(len(results))]
        if not segment.is_policy:
            inside_thought = opens_thought(segment.text)
            for search, call_id in zip(results, ids, strict=True):
                with_ids = any(f", id: {hit.passage.id})" in segment.text for hit in search.shown_hits[:1])
                content = shown_result(search, with_ids)
                yield {"role": "tool", "name": search.tool, "tool_call_id": call_id, "content": content}
            continue
        turn = form.read(segment.text, inside_thought, [search.tool for search in results])
        calls = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": search.tool, "arguments": search.arguments},
            }
            for search, call_id in zip(results, ids, strict=True)
        ]
        thought = form.bare(turn.thought)
        yield {
            "role": "assistant", "content": turn.text.strip(), "reasoning_content": thought or None,
            "tool_calls": calls or None,
        }  # fmt: skip


def declared(trajectory: Trajectory) -> str | None:
    """The tools of an episode as JSON, in OpenAI's form: search, and what it called of open and find; None
    where it talks by tags."""
    if trajectory.protocol == "tags":
        return None
    names = sorted({search.retriever for search in trajectory.searches} - {""})
    called = {search.tool for search in trajectory.searches}
    page_tools = [schema(each.name, each.description, each.parameters)
              for each in (OpenCall, FindCall) if each.name in called]  # fmt: skip
    return json.dumps([schema("search", SearchCall.description, search_parameters(names)), *page_tools])


def searches_of_prompt(trajectory: Trajectory) -> tuple[Search, ...]:
    """The search that was made before the first turn, for a prompt with the passages (`{information}`)."""
    retrieved = any(INFORMATION in message["content"] for message in trajectory.question.prompt or ())
    return tuple(trajectory.searches[:1]) if retrieved else ()


def with_passages(prompt: Sequence[Mapping[str, str]], rendered: str) -> list[dict[str, str]]:
    """The prompt's messages with the passages that the policy read where a template says `{information}`.

    The log has the template's messages, and the prompt as it was rendered for the model: the passages are
    what stands there between the last information tags.
    """
    _, tag, after = rendered.rpartition("<information>")
    passages, end, _ = after.partition("</information>")
    read = f"{tag}{passages}{end}" if end else INFORMATION
    return [{**message, "content": message["content"].replace(INFORMATION, read, 1)} for message in prompt]
