"""Trajectories as logs of Inspect (`.eval`), which `inspect view` shows; written by inspect_ai itself.

An evaluation of Inspect has each (question, sample) once, so each step and phase is a log of its own. The
question's id is the sample's `id`, and the sample counted from 1 its `epoch`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import duckdb

from srl import __version__
from srl.browse.filters import Condition
from srl.browse.messages import searches_of_prompt, with_passages
from srl.browse.transcript import search_json
from srl.errors import UserError
from srl.files import atomic_directory, digest_text
from srl.install import pip_install
from srl.store import Record, rows
from srl.store.batches import Batch, batches
from srl.store.verdict import VERDICTS
from srl.trajectory import Search, Segment, Trajectory

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog, EvalResults, EvalSample
    from inspect_ai.model import ChatMessage

TOOL = "search"
"""The name of the tool in the calls."""

_METADATA = (
    "id", "run_id", "step", "phase", "position", "question", "data_source", "split", "hops", "attempt", "end",
    "verdict", "valid", "left_out", "turns", "searches", "valid_actions", "valid_searches", "tokens",
    "total_tokens", "gold_in_passages", "index_digest",
)  # fmt: skip
"""The columns of `trajectories` in a sample's metadata."""


def write_eval_logs(connection: duckdb.DuckDBPyConnection, chosen: Condition, out: Path) -> int:
    """Write the trajectories `chosen` into the new directory `out`; returns their number.

    A file holds one step and phase; one of more than `srl.store.batches.SIZE` trajectories has several.
    Raises UserError if `out` has files, or inspect_ai is not installed.
    """
    try:
        from inspect_ai.log import write_eval_log
    except ImportError as error:
        raise UserError("Inspect's logs need inspect_ai", hint=f"type: {pip_install('inspect')}") from error
    count, runs = 0, {row["run_id"]: row for row in rows(connection, "FROM runs")}
    with atomic_directory(out) as directory:
        for batch in batches(connection, *chosen, tokens=False):
            log = _log(connection, batch, runs[batch.run_id])
            # Inspect reads time, task and id from this name without opening the file.
            name = f"{str(log.eval.created).replace(':', '-')}_{log.eval.task}_{log.eval.task_id}.eval"
            write_eval_log(log, str(directory / name))
            count += len(batch.pairs)
    return count


def _log(connection: duckdb.DuckDBPyConnection, batch: Batch, run: Mapping[str, Any]) -> EvalLog:
    """The log of a batch; `run` is the row of its run in `runs`."""
    from inspect_ai.log import EvalConfig, EvalDataset, EvalLog, EvalPlan, EvalPlanStep, EvalSpec

    where, place = "run_id = ? AND step = ? AND phase = ?", [batch.run_id, batch.step, batch.phase]
    [(written,)] = connection.execute(f"SELECT written FROM steps WHERE {where}", place).fetchall()
    query = f"SELECT name, value FROM metrics WHERE {where} AND isfinite(value) ORDER BY name"
    metrics = dict(connection.execute(query, place).fetchall())
    task = f"{batch.phase}-step-{batch.step}" + (f"-part-{batch.number}" if batch.number > 1 else "")
    trajectories = [record.trajectory for record, _ in batch.pairs]
    asked = list(dict.fromkeys(one.question.id for one in trajectories))
    model = run["model"] or "unknown"
    about = {name: run[name] for name in ("run_id", "preset", "algo", "seed", "index_digest", "parent")}
    spec = EvalSpec(
        eval_id=digest_text(batch.run_id, task)[:22], run_id=batch.run_id, task=task,
        task_id=digest_text(task, batch.run_id)[:22],
        created=written.replace(tzinfo=UTC).isoformat(timespec="seconds"),
        dataset=EvalDataset(
            name=", ".join(sorted({one.question.data_source for one in trajectories})),
            samples=len(asked), sample_ids=asked,
        ),
        model=model, config=EvalConfig(epochs=1 + max(one.sample for one in trajectories)),
        packages={"srl-search": run["srl_version"] or __version__},
        task_args={"step": batch.step, "phase": batch.phase},
        metadata=about | {"config": json.loads(run["config"]), "metrics": metrics},
    )  # fmt: skip
    samples = [_sample(record, row, model) for record, row in batch.pairs]
    plan = EvalPlan(steps=[EvalPlanStep(solver="srl")])
    return EvalLog(status="success", eval=spec, plan=plan, results=_results(samples), samples=samples)


def _results(samples: Sequence[EvalSample]) -> EvalResults:
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
    return EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=scores)


def _sample(record: Record, row: Mapping[str, Any], model: str) -> EvalSample:
    """A trajectory; its output is the last text of the policy. Scores that the log lacks are left out."""
    from inspect_ai.log import EvalError, EvalSample
    from inspect_ai.model import ModelOutput, ModelUsage
    from inspect_ai.scorer import Score

    made = record.trajectory
    wrote = [segment.text for segment in made.segments if segment.is_policy] or [""]
    parts = record.score.parts if record.score else {}
    values = {**parts, **{name: row[name] for name in ("reward", "em", "f1", "cover_em")}}
    metadata = {name: row[name] for name in _METADATA}
    why = {"em": VERDICTS.get(row["verdict"] or "")}
    total, own = row["total_tokens"], row["tokens"]
    prompt = list(_prompt(made))
    return EvalSample(
        id=made.question.id, epoch=made.sample + 1, uuid=digest_text(row["run_id"], made.id)[:22],
        input=prompt, target=list(made.question.golden_answers), messages=prompt + list(_messages(made)),
        output=ModelOutput.from_content(
            model, wrote[-1], stop_reason="model_length" if made.end == "truncated" else "stop"
        ),
        scores={
            name: Score(value=value, answer=row["answer"], explanation=why.get(name))
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        },
        model_usage={model: ModelUsage(input_tokens=total - own, output_tokens=own, total_tokens=total)},
        metadata=metadata | {"question_metadata": dict(made.question.metadata)},
        total_time=made.seconds, turn_count=made.turns,
        error=None if made.valid else EvalError(message=made.fault, traceback="", traceback_ansi=""),
    )  # fmt: skip


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
            calls = [ToolCall(call, TOOL, _arguments(search)) for call, search in waiting] or None
            yield ChatMessageAssistant(content=segment.text, id=name, tool_calls=calls, source="generate")
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
    from inspect_ai.tool import ToolCallError

    text = observation.text if observation else ""
    if observation and not calls:
        yield ChatMessageTool(content=text, id=name, function=TOOL)
    kinds: dict[str, Any] = {"timed_out": "timeout", "rejected": "parsing"}
    for place, (call, search) in enumerate(calls):
        failed = search.status not in ("ok", "empty")
        error = ToolCallError(kinds.get(search.status, "unknown"), f"{search.status}: {search.error}")
        yield ChatMessageTool(
            content=text if place == 0 else "", id=f"{call}-result", tool_call_id=call, function=TOOL,
            error=error if failed else None, metadata=search_json(search),
        )  # fmt: skip
