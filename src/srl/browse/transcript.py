"""One trajectory in full: who wrote what, what the searches returned, rewards and advantages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import duckdb

from srl.answers import findable
from srl.browse.formatting import counted, number
from srl.browse.messages import searches_of_prompt
from srl.errors import UserError
from srl.protocol import ENGINE, FORMATS, opens_thought
from srl.store import PER_TOKEN, Record, read_with_rows, rows
from srl.store.verdict import VERDICTS
from srl.trajectory import Search, Segment

SpanKind = Literal["thought", "search", "answer", "other"]

_KINDS: dict[str, SpanKind] = {"think": "thought", "search": "search", "answer": "answer"}
_TAG = re.compile(rf"<(/?)(think|search|answer)(?:(?<=<search){ENGINE})?>")
_LISTED = 5
_TOOLS = ("search", "open", "find")
"""Names by which an object of JSON alone is a call."""


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


def place_of(connection: duckdb.DuckDBPyConnection, prefix: str) -> dict[str, Any]:
    """Where the trajectory is whose id begins with `prefix`: id, run_id, step, phase and question_id.

    Raises NoTrajectoryError for none and UserError for several.
    """
    query = """
        SELECT id, run_id, step, phase, question_id FROM trajectories WHERE starts_with(id, ?)
        ORDER BY id, run_id, step
    """
    places = rows(connection, query, [prefix.lower()])
    if not places:
        raise NoTrajectoryError(f"no trajectory {prefix!r}")
    ids = list(dict.fromkeys(row["id"] for row in places))
    if len(ids) > 1:
        examples = ", ".join(ids[:_LISTED]) + (", …" if len(ids) > _LISTED else "")
        raise UserError(f"{prefix!r} matches {len(ids)} trajectories: {examples}", hint="type more of the id")
    return places[0]


def transcript(connection: duckdb.DuckDBPyConnection, prefix: str) -> Transcript:
    """The trajectory whose id begins with `prefix`."""
    place = place_of(connection, prefix)
    where = "id = ? AND run_id = ? AND step = ?"
    return transcripts(connection, where, [place["id"], place["run_id"], place["step"]])[0]


def transcripts(
    connection: duckdb.DuckDBPyConnection, where: str, parameters: Sequence[object]
) -> list[Transcript]:
    """The trajectories that satisfy the SQL condition `where`, in the order written."""
    pairs = read_with_rows(connection, where, parameters)
    return [Transcript(row, record, tuple(_steps(record))) for record, row in pairs]


def facts(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What there is to say of a trajectory beside its question and its text: names, and texts of others too.

    `row` is its row of `trajectories`. Both `srl inspect show` and the page print these.
    """
    yield "gold", " | ".join(row["golden_answers"])
    yield "answer", "(none)" if row["answer"] is None else row["answer"]
    yield "verdict", VERDICTS.get(row["verdict"], "(no golden answers)")
    parts = ", ".join(f"{name} {number(value)}" for name, value in row["parts"].items())
    scores = {name: row[name] for name in ("em", "f1") if name not in row["parts"] and row[name] is not None}
    measures = ", ".join(f"{name} {number(value)}" for name, value in scores.items())
    reward = "(not scored)" if row["reward"] is None else number(row["reward"])
    yield "reward", "; ".join(filter(None, (reward, parts and f"parts before weights: {parts}", measures)))
    counts = f"{counted(row['turns'], 'turn')} and {counted(row['searches'], 'search', 'searches')}"
    tokens = f"{row['tokens']} of {counted(row['total_tokens'], 'token')} written by the policy"
    yield "end", f"{row['end']} after {counts}; {tokens}"
    hops = "" if row["hops"] is None else f", {counted(row['hops'], 'hop')}"
    source = ", ".join(filter(None, (row["data_source"], row["question_id"])))
    yield "place", f"{row['phase']} step {row['step']}, sample {row['sample']} of {source}{hops}"
    if row["error"]:
        yield "error", row["error"]


def marked(text: str, golds: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """The pieces of `text` in order, and whether each is a golden answer, in whole words of any case.

    Yes and no are not marked: they prove nothing where they stand.
    """
    pattern = _pattern(tuple(golds))
    start = 0
    for match in pattern.finditer(text) if pattern else ():
        yield text[start : match.start()], False
        yield match[0], True
        start = match.end()
    yield text[start:], False


@lru_cache(64)
def _pattern(golds: tuple[str, ...]) -> re.Pattern[str] | None:
    """What finds the golden answers, with any signs between their words; None if there is nothing to find."""
    words = [re.findall(r"\w+", gold) for gold in golds if findable([gold])]
    texts = sorted((r"\W+".join(map(re.escape, parts)) for parts in words if parts), key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(texts)})(?!\w)", re.IGNORECASE) if texts else None


def as_json(shown: Transcript) -> dict[str, Any]:
    """The transcript for a program: the row of `trajectories` with its segments and searches."""
    trajectory = shown.record.trajectory
    return shown.row | {
        "prompt": trajectory.question.prompt,
        "metadata": trajectory.question.metadata,
        "segments": [
            {name: getattr(step.segment, name) for name in ("kind", "turn", "text", "token_ids", "logprobs")}
            | {"mask": int(step.segment.is_policy)}
            | {name: getattr(step, name) for name in PER_TOKEN}
            for step in shown.steps
        ],
        "search_results": [search_json(search) for search in trajectory.searches],
    }


def search_json(search: Search) -> dict[str, Any]:
    """A search with its hits, for a program."""
    names = (
        "turn",
        "tool",
        "arguments",
        "retriever",
        "query",
        "status",
        "latency_s",
        "attempts",
        "error",
        "index_digest",
        "cut",
    )
    hits = [
        {**hit.passage.row(), "title": hit.passage.title, "score": hit.score, "shown": search.shown_as(rank)}
        for rank, hit in enumerate(search.hits, start=1)
    ]
    return {name: getattr(search, name) for name in names} | {"hits": hits}


def _steps(record: Record) -> list[Step]:
    trajectory, steps, start = record.trajectory, [], 0
    think_is_open, before = trajectory.think_is_open, searches_of_prompt(record.trajectory)
    by_policy = trajectory.searches[len(before) :]
    for segment in trajectory.segments:
        stop = start + len(segment.token_ids)
        if segment.is_policy:
            searches = tuple(search for search in by_policy if search.turn == segment.turn)
            values = {name: tuple((getattr(record, name) or ())[start:stop]) for name in PER_TOKEN}
            parts = spans(segment.text, think_is_open, trajectory.protocol)
            steps.append(Step(segment, parts, searches, **values))
            think_is_open = False
        else:
            think_is_open |= trajectory.protocol != "tags" and opens_thought(segment.text)
            steps.append(Step(segment, searches=before if segment.kind == "prompt" else ()))
        start = stop
    return steps


def spans(text: str, think_is_open: bool = False, protocol: str = "tags") -> tuple[Span, ...]:
    """`text` split by our tags, or into thought, calls and message; joined, the spans are `text` again.

    A tag that is not closed extends to the next opening one, or the end. `think_is_open`: the text begins
    inside `<think>`.
    """
    if protocol != "tags":
        return tuple(span for span in _spans_of_calls(text, think_is_open, protocol) if span.text)
    split: list[Span] = []
    kind: SpanKind = "thought" if think_is_open else "other"
    start = 0
    for tag in _TAG.finditer(text):
        closes, tag_kind = bool(tag[1]), _KINDS[tag[2]]
        if closes and tag_kind != kind:
            continue
        end = tag.end() if closes else tag.start()
        split.append(Span(kind, text[start:end]))
        kind, start = "other" if closes else tag_kind, end
    split.append(Span(kind, text[start:]))
    return tuple(span for span in split if span.text)


def _spans_of_calls(text: str, think_is_open: bool, protocol: str) -> Iterator[Span]:
    """The last message, which calls nothing, is the answer."""
    turn = FORMATS[protocol].read(text, think_is_open, _TOOLS)
    yield Span("thought", turn.thought)
    start = len(turn.thought)
    for raw in dict.fromkeys(call.raw for call in turn.calls):
        place = text.index(raw, start)
        yield Span("other", text[start:place])
        yield Span("search", raw)
        start = place + len(raw)
    yield Span("other" if turn.calls else "answer", text[start:])


def describe(values: Sequence[float]) -> str:
    """A summary of numbers: their common value, or lowest to highest; empty for none."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return f"{low:+.3f}" if high - low < 5e-4 else f"{low:+.3f} … {high:+.3f}"
