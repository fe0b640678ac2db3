"""Trajectories as logs of Inspect (`.eval`), which `inspect view` shows; written by inspect_ai itself.

An evaluation of Inspect has each (question, sample) once, so each step and phase is a log of its own. The
question's id is the sample's `id`, and the sample counted from 1 its `epoch`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import duckdb

from srl import __version__
from srl.browse.messages import Batch, batches, searches_of_prompt, with_passages
from srl.browse.trajectories import Filter
from srl.browse.transcript import search_json
from srl.errors import UserError
from srl.files import atomic_directory, digest_text
from srl.install import pip_install
from srl.store import Record, rows
from srl.store.verdict import VERDICTS
from srl.trajectory import Search, Segment, Trajectory

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalResults, EvalSample, EvalSpec
    from inspect_ai.model import ChatMessage, ModelOutput
    from inspect_ai.scorer import Score

TOOL = "search"
"""The name of the tool in the calls."""

_MEASURES = ("reward", "em", "f1", "cover_em")
_METADATA = (
    "id", "run_id", "step", "phase", "position", "question", "data_source", "split", "hops", "attempt", "end",
    "verdict", "valid", "left_out", "turns", "searches", "valid_actions", "valid_searches", "tokens",
    "total_tokens", "gold_in_passages", "index_digest",
)  # fmt: skip
"""The columns of `trajectories` in a sample's metadata."""


def write_eval_logs(connection: duckdb.DuckDBPyConnection, chosen: Filter, out: Path) -> int:
    """Write the trajectories `chosen` into the new directory `out`; returns their number.

    A file holds one step and phase; one of more than `srl.browse.messages.SIZE` trajectories has several.
    Raises UserError if nothing is chosen, `out` has files, or inspect_ai is not installed.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError as error:
        raise UserError(f"writing Inspect's logs needs inspect_ai; type: {pip_install('inspect')}") from error
    count, runs = 0, {row["run_id"]: row for row in rows(connection, "FROM runs")}
    with atomic_directory(out) as directory:
        for batch in batches(connection, chosen):
            log = _log(batch, runs[batch.run_id], _step(connection, batch))
            write_eval_log(log, str(directory / _file_name(log.eval)))
            count += len(batch.pairs)
    return count


@dataclass(frozen=True, slots=True)
class _Step:
    """When a step was `written` (UTC), and its finite metrics."""

    written: datetime
    metrics: Mapping[str, float]


def _step(connection: duckdb.DuckDBPyConnection, batch: Batch) -> _Step:
    where, given = "run_id = ? AND step = ? AND phase = ?", [batch.run_id, batch.step, batch.phase]
    [(written,)] = connection.execute(f"SELECT written FROM steps WHERE {where}", given).fetchall()
    query = f"SELECT name, value FROM metrics WHERE {where} AND isfinite(value) ORDER BY name"
    return _Step(written, dict(connection.execute(query, given).fetchall()))


def _log(batch: Batch, run: Mapping[str, Any], step: _Step) -> EvalLog:
    """The log of a batch; `run` is the row of its run in `runs`."""
    from inspect_ai.log import EvalLog, EvalPlan, EvalPlanStep

    samples = [_sample(record, row, run["model"] or "unknown") for record, row in batch.pairs]
    return EvalLog(
        status="success",
        eval=_spec(batch, run, step),
        plan=EvalPlan(steps=[EvalPlanStep(solver="srl")]),
        results=_results(samples),
        samples=samples,
    )


def _file_name(spec: EvalSpec) -> str:
    """The name that Inspect reads time, task and id from without opening the file."""
    return f"{str(spec.created).replace(':', '-')}_{spec.task}_{spec.task_id}.eval"


def _spec(batch: Batch, run: Mapping[str, Any], step: _Step) -> EvalSpec:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalSpec

    part = f"-part-{batch.number}" if batch.number > 1 else ""
    task = f"{batch.phase}-step-{batch.step}{part}"
    trajectories = [record.trajectory for record, _ in batch.pairs]
    asked = list(dict.fromkeys(one.question.id for one in trajectories))
    about = {name: run[name] for name in ("run_id", "preset", "algo", "seed", "index_digest", "parent")}
    return EvalSpec(
        eval_id=digest_text(batch.run_id, task)[:22], run_id=batch.run_id, task=task,
        task_id=digest_text(task, batch.run_id)[:22],
        created=step.written.replace(tzinfo=UTC).isoformat(timespec="seconds"),
        dataset=EvalDataset(
            name=", ".join(sorted({one.question.data_source for one in trajectories})),
            samples=len(asked), sample_ids=asked,
        ),
        model=run["model"] or "unknown",
        config=EvalConfig(epochs=1 + max(one.sample for one in trajectories)),
        packages={"srl-search": run["srl_version"] or __version__},
        task_args={"step": batch.step, "phase": batch.phase},
        metadata=about | {"config": json.loads(run["config"]), "metrics": dict(step.metrics)},
    )  # fmt: skip


def _results(samples: list[EvalSample]) -> EvalResults:
    """The mean of each score over the samples that have it."""
    from inspect_ai.log import EvalMetric, EvalResults, EvalScore

    by_name: dict[str, list[float]] = {}
    for sample in samples:
        for name, score in (sample.scores or {}).items():
            by_name.setdefault(name, []).append(score.as_float())
    scores = [
        EvalScore(
            name=name, scorer=name, scored_samples=len(values),
            metrics={"mean": EvalMetric(name="mean", value=fmean(values))},
        )
        for name, values in by_name.items()
    ]  # fmt: skip
    count = len(samples)
    return EvalResults(total_samples=count, completed_samples=count, scores=scores)


def _sample(record: Record, row: Mapping[str, Any], model: str) -> EvalSample:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ModelUsage

    made = record.trajectory
    read = row["total_tokens"] - row["tokens"]
    about = {column: row[column] for column in _METADATA}
    usage = ModelUsage(input_tokens=read, output_tokens=row["tokens"], total_tokens=row["total_tokens"])
    prompt = list(_prompt(made))
    return EvalSample(
        id=made.question.id, epoch=made.sample + 1, uuid=digest_text(row["run_id"], made.id)[:22],
        input=prompt, target=list(made.question.golden_answers), messages=prompt + list(_messages(made)),
        output=_output(made, model), scores=_scores(record, row), model_usage={model: usage},
        metadata=about | {"question_metadata": dict(made.question.metadata)},
        total_time=made.seconds, turn_count=made.turns, error=_error(made),
    )  # fmt: skip


def _error(made: Trajectory) -> Any:
    from inspect_ai.log import EvalError

    return None if made.valid else EvalError(message=made.fault, traceback="", traceback_ansi="")


def _prompt(made: Trajectory) -> Iterator[ChatMessage]:
    """The prompt's messages; the rendered text as the user's if the log has none."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser

    kinds = {"system": ChatMessageSystem, "assistant": ChatMessageAssistant}
    rendered = [one.text for one in made.segments if one.kind == "prompt"]
    messages = with_passages(made.question.prompt or (), "".join(rendered))
    for place, message in enumerate(messages or [{"role": "user", "content": text} for text in rendered]):
        kind = kinds.get(message["role"], ChatMessageUser)
        yield kind(content=message["content"], id=f"{made.id}-p{place}", source="input")


def _messages(made: Trajectory) -> Iterator[ChatMessage]:
    """What followed the prompt: each search of the policy is a tool call, and the observation its result."""
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser
    from inspect_ai.tool import ToolCall

    by_turn: dict[int, list[tuple[str, Search]]] = {}
    for place, search in list(enumerate(made.searches))[len(searches_of_prompt(made)) :]:
        by_turn.setdefault(search.turn, []).append((f"{made.id}-s{place}", search))
    waiting: list[tuple[str, Search]] = []
    for place, segment in enumerate(made.segments):
        name = f"{made.id}-{place}"
        if segment.kind == "policy":
            yield from _results_of(waiting, None)
            waiting = by_turn.pop(segment.turn, [])
            calls = [ToolCall(call, TOOL, _arguments(search)) for call, search in waiting]
            yield ChatMessageAssistant(
                content=segment.text, id=name, tool_calls=calls or None, source="generate"
            )
        elif segment.kind == "observation":
            yield from _results_of(waiting, segment, name)
            waiting = []
        elif segment.kind == "feedback":
            yield ChatMessageUser(content=segment.text, id=name)
    yield from _results_of(waiting, None)


def _arguments(search: Search) -> dict[str, Any]:
    named = {"retriever": search.retriever} if search.retriever else {}
    return {"query": search.query, **named}


def _results_of(
    calls: list[tuple[str, Search]], observation: Segment | None, name: str = ""
) -> Iterator[ChatMessage]:
    """The results of searches: the first has the text of the observation, as the policy saw one text."""
    from inspect_ai.model import ChatMessageTool

    text = observation.text if observation else ""
    if observation and not calls:
        yield ChatMessageTool(content=text, id=name, function=TOOL)
    for place, (call, search) in enumerate(calls):
        yield ChatMessageTool(
            content=text if place == 0 else "", id=f"{call}-result", tool_call_id=call, function=TOOL,
            error=_call_error(search), metadata=search_json(search),
        )  # fmt: skip


def _call_error(search: Search) -> Any:
    from inspect_ai.tool import ToolCallError

    if search.status in ("ok", "empty"):
        return None
    kinds = {"timed_out": "timeout", "rejected": "parsing"}
    return ToolCallError(kinds.get(search.status, "unknown"), f"{search.status}: {search.error}")


def _output(made: Trajectory, model: str) -> ModelOutput:
    """The last text of the policy."""
    from inspect_ai.model import ModelOutput

    wrote = [segment.text for segment in made.segments if segment.is_policy]
    reason = "model_length" if made.end == "truncated" else "stop"
    return ModelOutput.from_content(model, wrote[-1] if wrote else "", stop_reason=reason)


def _scores(record: Record, row: Mapping[str, Any]) -> dict[str, Score]:
    """The reward, its parts, and exact match and F1; those that the log lacks are left out."""
    from inspect_ai.scorer import Score

    parts = record.score.parts if record.score else {}
    values = {**parts, **{name: row[name] for name in _MEASURES}}
    why = VERDICTS.get(row["verdict"] or "")
    return {
        name: Score(value=value, answer=row["answer"], explanation=why if name == "em" else None)
        for name, value in values.items()
        if value is not None and math.isfinite(value)
    }
