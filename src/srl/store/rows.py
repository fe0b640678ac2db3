"""Records in, Arrow tables out: how a finished step is laid out in the tables of the log."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pyarrow as pa

from srl.answers import contains_answer, exact_match, f1
from srl.store.schema import PARTS
from srl.trajectory import Hit, Phase, Question, Score, Search, Segment, Trajectory

Row = dict[str, Any]


@dataclass(slots=True)
class Record:
    """A trajectory with what training made of it.

    `advantages` and `returns` are as long as the trajectory's `token_ids`; the log keeps those of the
    policy's tokens (the others are 0), in single precision like the log-probs.
    """

    trajectory: Trajectory
    score: Score | None = None
    advantages: Sequence[float] | None = None
    returns: Sequence[float] | None = None


def part_tables(
    run_id: str, step: int, phase: Phase, records: Sequence[Record], metrics: Mapping[str, float]
) -> dict[str, pa.Table]:
    """The tables of one finished step. Raises ValueError for records of another step or phase."""
    if step < 0:
        raise ValueError(f"a step is counted from 0, not {step}")
    rows: dict[str, list[Row]] = {name: [] for name in PARTS}
    once = _Once()
    for position, record in enumerate(records):
        _check(record, step, phase)
        keys = {"run_id": run_id, "step": step, "phase": phase, "trajectory_id": record.trajectory.id}
        searches = list(_search_rows(record.trajectory, keys, once))
        rows["searches"] += searches
        rows["segments"] += _segment_rows(record, keys)
        rows["trajectories"].append(_trajectory_row(record, position, searches, once) | keys)
    rows["steps"].append(_step_row(run_id, step, phase, len(records), metrics))
    return {name: _table(rows[name], schema) for name, schema in PARTS.items()}


class _Once:
    """What the samples of a question share, worked out once a step: answers, passages, the question."""

    def __init__(self) -> None:
        self.contains_answer = cache(contains_answer)
        self.measures = {"em": cache(exact_match), "f1": cache(f1)}
        self._questions: dict[int, Row] = {}

    def question(self, question: Question) -> Row:
        """The question's columns, by identity: the records keep it alive meanwhile."""
        if id(question) not in self._questions:
            self._questions[id(question)] = _question_columns(question)
        return self._questions[id(question)]


def _check(record: Record, step: int, phase: Phase) -> None:
    trajectory = record.trajectory
    if (trajectory.step, trajectory.phase) != (step, phase):
        raise ValueError(
            f"trajectory {trajectory.id} is of {trajectory.phase} step {trajectory.step}, "
            f"and was given to be written as {phase} step {step}"
        )
    tokens = _tokens(trajectory)
    for name in ("advantages", "returns"):
        values = getattr(record, name)
        if values is not None and len(values) != tokens:
            raise ValueError(f"trajectory {trajectory.id} has {tokens} tokens and {len(values)} {name}")


def _tokens(trajectory: Trajectory) -> int:
    return sum(len(segment.token_ids) for segment in trajectory.segments)


def _step_row(run_id: str, step: int, phase: Phase, count: int, metrics: Mapping[str, float]) -> Row:
    return {
        "run_id": run_id,
        "step": step,
        "phase": phase,
        "written": datetime.now(UTC).replace(tzinfo=None),
        "trajectories": count,
        "metrics": [(name, float(value)) for name, value in metrics.items()],
    }


def _trajectory_row(record: Record, position: int, searches: list[Row], once: _Once) -> Row:
    trajectory, score = record.trajectory, record.score
    return {
        "id": trajectory.id,
        "position": position,
        "sample": trajectory.sample,
        "attempt": trajectory.attempt,
        "end": trajectory.end,
        "answer": trajectory.answer,
        "reward": None if score is None else score.value,
        "parts": [] if score is None else list(score.parts.items()),
        "per_turn": None if score is None else score.per_turn,
        "valid": trajectory.valid,
        "turns": trajectory.turns,
        "searches": len(searches),
        "valid_actions": trajectory.valid_actions,
        "valid_searches": trajectory.valid_searches,
        "tokens": trajectory.policy_tokens,
        "total_tokens": _tokens(trajectory),
        "gold_in_passages": any(hit["has_answer"] for row in searches for hit in row["hits"]),
        "think_is_open": trajectory.think_is_open,
        "index_digest": next((row["index_digest"] for row in searches if row["index_digest"]), ""),
        **once.question(trajectory.question),
        **_correctness(trajectory, score, once),
    }


def _question_columns(question: Question) -> Row:
    hops = question.metadata.get("hops")
    return {
        "question_id": question.id,
        "question": question.text,
        "prompt": _json([dict(message) for message in question.prompt]),
        "data_source": question.data_source,
        "split": question.split,
        "hops": hops if type(hops) is int and 0 <= hops < 2**31 else None,
        "metadata": _json(dict(question.metadata)),
        "golden_answers": question.golden_answers,
    }


def _correctness(trajectory: Trajectory, score: Score | None, once: _Once) -> dict[str, float | None]:
    golds = trajectory.question.golden_answers
    parts = score.parts if score else {}
    if not golds:
        return {name: parts.get(name) for name in once.measures}
    return {
        name: parts[name] if name in parts else measure(trajectory.answer, golds)
        for name, measure in once.measures.items()
    }


def _segment_rows(record: Record, keys: Row) -> Iterator[Row]:
    start = 0
    for position, segment in enumerate(record.trajectory.segments):
        stop = start + len(segment.token_ids)
        yield keys | {
            "position": position,
            "kind": segment.kind,
            "turn": segment.turn,
            "text": segment.text,
            "token_ids": segment.token_ids,
            "mask": int(segment.is_policy),
            "logprobs": segment.logprobs if segment.is_policy else None,
            "advantages": _slice(record.advantages, segment, start, stop),
            "returns": _slice(record.returns, segment, start, stop),
        }
        start = stop


def _slice(values: Sequence[float] | None, segment: Segment, start: int, stop: int) -> Sequence[float] | None:
    return values[start:stop] if values is not None and segment.is_policy else None


def _search_rows(trajectory: Trajectory, keys: Row, once: _Once) -> Iterator[Row]:
    golds = trajectory.question.golden_answers
    for position, search in enumerate(trajectory.searches):
        hits = [_hit_row(hit, once.contains_answer(hit.passage.contents, golds)) for hit in search.hits]
        yield keys | _search_columns(search) | {"position": position, "hits": hits}


def _search_columns(search: Search) -> Row:
    names = ("turn", "retriever", "query", "status", "latency_s", "attempts", "error", "index_digest")
    return {name: getattr(search, name) for name in names}


def _hit_row(hit: Hit, has_answer: bool) -> Row:
    passage = hit.passage
    return {
        "passage_id": passage.id,
        "title": passage.title,
        "contents": passage.contents,
        "score": hit.score,
        "has_answer": has_answer,
    }


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; a lone surrogate, which UTF-8 cannot hold, becomes a question mark."""
    rows = list(rows)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.Table.from_pylist([_utf8(row) for row in rows], schema=schema)


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _utf8(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_utf8(item) for item in value)
    return value
