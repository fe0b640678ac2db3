"""The transcript of one trajectory: who wrote what, what the searches found, rewards and advantages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import duckdb

from srl.browse.messages import searches_of_prompt
from srl.errors import UserError
from srl.protocol import ENGINE
from srl.store import PER_TOKEN, Record, read_with_rows, rows
from srl.trajectory import Hit, Search, Segment

SpanKind = Literal["thought", "search", "answer", "other"]

_KINDS: dict[str, SpanKind] = {"think": "thought", "search": "search", "answer": "answer"}
_TAG = re.compile(rf"<(/?)(think|search|answer)(?:(?<=<search){ENGINE})?>")
_LISTED = 5


@dataclass(frozen=True, slots=True)
class Span:
    """A part of the policy's text that belongs to one pair of tags, tags included."""

    kind: SpanKind
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """One segment, with the search that was made for it if it is a prompt with passages. For one that the
    policy wrote, also:

    `spans` of its text by tags, the `searches` it made, and what training computed for its tokens, each empty
    where it did not.
    """

    segment: Segment
    spans: tuple[Span, ...] = ()
    searches: tuple[Search, ...] = ()
    advantages: tuple[float, ...] = ()
    returns: tuple[float, ...] = ()
    trainer_logprobs: tuple[float, ...] = ()
    entropies: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Transcript:
    """A trajectory step by step; `row` is its row of the table `trajectories`."""

    row: dict[str, Any]
    record: Record
    steps: tuple[Step, ...]


class NoTrajectoryError(UserError):
    """No trajectory of the log has this id."""


def find(connection: duckdb.DuckDBPyConnection, prefix: str) -> dict[str, Any]:
    """Where the trajectory is whose id begins with `prefix`: id, run_id, step, phase and question_id.

    Raises NoTrajectoryError for none and UserError for several.
    """
    query = """
        SELECT id, run_id, step, phase, question_id FROM trajectories WHERE starts_with(id, ?)
        ORDER BY id, run_id, step
    """
    found = rows(connection, query, [prefix.lower()])
    if not found:
        raise NoTrajectoryError(f"no trajectory {prefix!r}")
    ids = list(dict.fromkeys(row["id"] for row in found))
    if len(ids) > 1:
        listed = ", ".join(ids[:_LISTED]) + (", …" if len(ids) > _LISTED else "")
        raise UserError(f"{prefix!r} matches {len(ids)} trajectories: {listed}; type more of the id")
    return found[0]


def transcript(connection: duckdb.DuckDBPyConnection, prefix: str) -> Transcript:
    """The trajectory whose id begins with `prefix`."""
    names = ("id", "run_id", "step")
    found = find(connection, prefix)
    where = " AND ".join(f"{name} = ?" for name in names)
    return transcripts(connection, where, [found[name] for name in names])[0]


def transcripts(
    connection: duckdb.DuckDBPyConnection, where: str, parameters: Sequence[object]
) -> list[Transcript]:
    """The trajectories that satisfy the SQL condition `where`, in the order written."""
    found = read_with_rows(connection, where, parameters)
    return [Transcript(row, record, tuple(_steps(record))) for record, row in found]


def as_json(shown: Transcript) -> dict[str, Any]:
    """The transcript for a program: the row of `trajectories` with its segments and searches."""
    trajectory = shown.record.trajectory
    return shown.row | {
        "prompt": trajectory.question.prompt,
        "metadata": trajectory.question.metadata,
        "segments": [_segment_json(step) for step in shown.steps],
        "search_results": [search_json(search) for search in trajectory.searches],
    }


def _segment_json(step: Step) -> dict[str, Any]:
    segment = step.segment
    return {
        "kind": segment.kind,
        "turn": segment.turn,
        "text": segment.text,
        "token_ids": segment.token_ids,
        "mask": int(segment.is_policy),
        "logprobs": segment.logprobs,
        **{name: getattr(step, name) for name in PER_TOKEN},
    }


def search_json(search: Search) -> dict[str, Any]:
    """A search with its hits, for a program."""
    names = ("turn", "retriever", "query", "status", "latency_s", "attempts", "error", "index_digest", "cut")
    hits = [
        _hit_json(hit) | {"shown": search.shown_as(rank)} for rank, hit in enumerate(search.hits, start=1)
    ]
    return {name: getattr(search, name) for name in names} | {"hits": hits}


def _hit_json(hit: Hit) -> dict[str, Any]:
    passage = hit.passage
    return {"id": passage.id, "title": passage.title, "contents": passage.contents, "score": hit.score}


def _steps(record: Record) -> list[Step]:
    trajectory, steps, start = record.trajectory, [], 0
    think_is_open, before = trajectory.think_is_open, searches_of_prompt(record.trajectory)
    by_policy = trajectory.searches[len(before) :]
    for segment in trajectory.segments:
        stop = start + len(segment.token_ids)
        if segment.is_policy:
            searches = tuple(search for search in by_policy if search.turn == segment.turn)
            values = {name: tuple((getattr(record, name) or ())[start:stop]) for name in PER_TOKEN}
            steps.append(Step(segment, spans(segment.text, think_is_open), searches, **values))
            think_is_open = False
        else:
            steps.append(Step(segment, searches=before if segment.kind == "prompt" else ()))
        start = stop
    return steps


def spans(text: str, think_is_open: bool = False) -> tuple[Span, ...]:
    """`text` split by our tags; joined, the spans are `text` again.

    A tag that is not closed extends to the next opening one, or the end. `think_is_open`: the text begins
    inside `<think>`.
    """
    found: list[Span] = []
    kind: SpanKind = "thought" if think_is_open else "other"
    start = 0
    for tag in _TAG.finditer(text):
        closes, of = bool(tag[1]), _KINDS[tag[2]]
        if closes and of == kind:
            end, after = tag.end(), "other"
        elif not closes:
            end, after = tag.start(), of
        else:
            continue
        _append(found, kind, text[start:end])
        kind, start = after, end  # type: ignore[assignment]
    _append(found, kind, text[start:])
    return tuple(found)


def _append(found: list[Span], kind: SpanKind, text: str) -> None:
    if text:
        found.append(Span(kind, text))


def describe(values: Sequence[float]) -> str:
    """A summary of numbers: their common value, or lowest to highest; empty for none."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:+.3f}" if high - low < 5e-4 else f"{low:+.3f} … {high:+.3f}"
