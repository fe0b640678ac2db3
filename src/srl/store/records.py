"""Records as rows of the log's tables, and back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import md5
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa

from srl.answers import contains_answer, cover_exact_match, exact_match, f1
from srl.store.schema import PARTS, PER_TOKEN
from srl.trajectory import Hit, Passage, Phase, Question, Score, Search, Segment, Trajectory

Row = dict[str, Any]
_FEW = 64
"""Trajectories that are looked up by their ids."""
_OF_TRAJECTORY = (
    "id", "sample", "attempt", "end", "answer", "valid_actions", "valid_searches", "malformed", "protocol",
    "seconds", "think_is_open", "error",
)  # fmt: skip
_OF_SEARCH = (
    "turn", "tool", "arguments", "retriever", "query", "status", "latency_s", "attempts", "error",
    "index_digest", "shown", "cut",
)  # fmt: skip
"""Columns that are fields of the same name."""


@dataclass(slots=True)
class Record:
    """A trajectory with its score, and what training computed for its tokens.

    `advantages`, `returns`, `trainer_logprobs` and `entropies` are as long as the trajectory's `token_ids`.
    The log keeps those of policy tokens (the others are 0), in single precision like the log-probs, and the
    entropies in half. `left_out`: dynamic sampling left its group out of the update.
    """

    trajectory: Trajectory
    score: Score | None = None
    advantages: Sequence[float] | None = None
    returns: Sequence[float] | None = None
    trainer_logprobs: Sequence[float] | None = None
    entropies: Sequence[float] | None = None
    left_out: bool = False


def part_tables(
    run_id: str, step: int, phase: Phase, records: Sequence[Record], metrics: Mapping[str, float]
) -> dict[str, pa.Table]:
    """The tables of one finished step. Raises ValueError for records of another step or phase."""
    if step < 0:
        raise ValueError(f"expected a step counted from 0, found {step}")
    of_step = {"run_id": run_id, "step": step, "phase": phase}
    rows: dict[str, list[Row]] = {name: [] for name in PARTS}
    once = _Once()
    for position, record in enumerate(records):
        _check(record, step, phase)
        keys = of_step | {"trajectory_id": record.trajectory.id}
        searches = [keys | row for row in _search_rows(record.trajectory, once)]
        rows["searches"] += searches
        rows["segments"] += [keys | row for row in _segment_rows(record)]
        rows["trajectories"].append(
            of_step | _trajectory_row(record, searches, once) | {"position": position}
        )
    written = datetime.now(UTC).replace(tzinfo=None)
    values = [(name, float(value)) for name, value in metrics.items()]
    rows["steps"].append(of_step | {"written": written, "trajectories": len(records), "metrics": values})
    return {name: _table(rows[name], schema) for name, schema in PARTS.items()}


class _Once:
    """Caches per step what the samples of a question share: answers, passages, the question."""

    def __init__(self) -> None:
        self.contains_answer = cache(contains_answer)
        self.measures = {
            "em": cache(exact_match), "f1": cache(f1), "cover_em": cache(cover_exact_match)
        }  # fmt: skip
        self._questions: dict[int, Row] = {}

    def question(self, question: Question) -> Row:
        """The question's columns, cached by identity: the records keep the question alive."""
        if id(question) not in self._questions:
            self._questions[id(question)] = _question_columns(question)
        return self._questions[id(question)]


def _check(record: Record, step: int, phase: Phase) -> None:
    trajectory = record.trajectory
    if (trajectory.step, trajectory.phase) != (step, phase):
        raise ValueError(
            f"trajectory {trajectory.id} is of {trajectory.phase} step {trajectory.step}, "
            f"but was passed as {phase} step {step}"
        )
    tokens = len(trajectory.token_ids)
    for name in PER_TOKEN:
        values = getattr(record, name)
        if values is not None and len(values) != tokens:
            raise ValueError(f"trajectory {trajectory.id} has {tokens} tokens and {len(values)} {name}")


def _trajectory_row(record: Record, searches: list[Row], once: _Once) -> Row:
    trajectory, score = record.trajectory, record.score
    golds, parts = trajectory.question.golden_answers, score.parts if score else {}
    correctness = {
        name: parts[name] if name in parts else measure(trajectory.answer, golds) if golds else None
        for name, measure in once.measures.items()
    }
    return {
        **once.question(trajectory.question),
        **{name: getattr(trajectory, name) for name in _OF_TRAJECTORY},
        **correctness,
        "reward": score.value if score else None,
        "parts": list(parts.items()),
        "per_turn": score.per_turn if score else None,
        "left_out": record.left_out,
        "turns": trajectory.turns,
        "valid": trajectory.valid,
        "searches": len(searches),
        "tokens": trajectory.policy_tokens,
        "total_tokens": len(trajectory.token_ids),
        "gold_in_passages": any(hit["has_answer"] for row in searches for hit in row["hits"][: row["shown"]]),
        "index_digest": next((row["index_digest"] for row in searches if row["index_digest"]), ""),
    }


def _question_columns(question: Question) -> Row:
    return {
        "question_id": question.id,
        "question": question.text,
        "prompt": _json([dict(message) for message in question.prompt]),
        "data_source": question.data_source,
        "split": question.split,
        "hops": question.hops,
        "metadata": _json(dict(question.metadata)),
        "golden_answers": question.golden_answers,
    }


QUESTION_DIGEST = (
    "md5(concat_ws(chr(31), question_id, question, prompt, data_source, split, metadata, "
    "array_to_string(golden_answers, chr(30))))"
)
"""SQL for what `question_digest` returns for the question of a row of `trajectories`."""


def question_digest(question: Question) -> str:
    """A digest of all that the log holds of a question: text, prompt, answers, metadata, where it is from."""
    columns = _question_columns(question)
    names = ("question_id", "question", "prompt", "data_source", "split", "metadata")
    texts = [*(columns[name] for name in names), chr(30).join(columns["golden_answers"])]
    return md5(chr(31).join(texts).encode("utf-8", "replace"), usedforsecurity=False).hexdigest()


def _segment_rows(record: Record) -> Iterator[Row]:
    """What the policy did not write has no numbers. Entropies are rounded to half precision: zstd leaves
    little of the bytes that are zero then."""
    start = 0
    for position, segment in enumerate(record.trajectory.segments):
        stop = start + len(segment.token_ids)
        row: Row = {
            "position": position,
            "kind": segment.kind,
            "turn": segment.turn,
            "text": segment.text,
            "token_ids": segment.token_ids,
            "mask": int(segment.is_policy),
        }
        if segment.is_policy:
            values = {name: getattr(record, name) for name in PER_TOKEN}
            row |= {name: numbers[start:stop] for name, numbers in values.items() if numbers is not None}
            row["logprobs"] = segment.logprobs
            if "entropies" in row:
                row["entropies"] = np.asarray(row["entropies"], np.float16).astype(np.float32)
        yield row
        start = stop


def _search_rows(trajectory: Trajectory, once: _Once) -> Iterator[Row]:
    golds = trajectory.question.golden_answers
    queries: set[str] = set()
    for position, search in enumerate(trajectory.searches):
        shown_texts = search.shown_texts
        texts = [*shown_texts, *(hit.passage.contents for hit in search.hits[len(shown_texts) :])]
        hits = [
            {
                "passage_id": hit.passage.id,
                "title": hit.passage.title,
                "contents": hit.passage.contents,
                "url": hit.passage.url,
                "score": hit.score,
                "has_answer": once.contains_answer(text, golds),
            }
            for hit, text in zip(search.hits, texts, strict=True)
        ]
        query = search.query.strip(" ").lower()
        yield {
            **{name: getattr(search, name) for name in _OF_SEARCH},
            "position": position,
            "hits": hits,
            "returned": len(hits),
            "gold_rank": next((rank for rank, hit in enumerate(hits, start=1) if hit["has_answer"]), None),
            "judged": bool(golds),
            "repeated": query in queries,
        }
        queries.add(query)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _table(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as a table; a lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
    rows = list(rows)
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except UnicodeEncodeError:
        return pa.Table.from_pylist([_utf8(row) for row in rows], schema=schema)


def _utf8(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _utf8(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_utf8(part) for part in value)
    return value


RECORD_ORDER = "run_id, step, phase, position, id"
"""The order of `read_records`: several writes of one step each count positions from 0."""


def read_records(
    connection: duckdb.DuckDBPyConnection, where: str = "true", parameters: Sequence[object] = ()
) -> list[Record]:
    """The records of the trajectories that satisfy the SQL condition `where`, in the order written.

    Of what training computed for the tokens, those that the policy did not write have 0.
    """
    return [record for record, _ in read_with_rows(connection, where, parameters)]


Reads = Literal["all", "ids", "texts"]
"""What is read of segments: all, not what training computed for their tokens, or their texts alone; most of
the time goes to numbers of tokens."""


def read_with_rows(
    connection: duckdb.DuckDBPyConnection,
    where: str = "true",
    parameters: Sequence[object] = (),
    reads: Reads = "all",
) -> list[tuple[Record, Row]]:
    """The records of `read_records`, each with its row of the table `trajectories`."""
    trajectories = rows(connection, f"FROM trajectories WHERE {where} ORDER BY {RECORD_ORDER}", parameters)
    empty = {"all": (), "ids": PER_TOKEN, "texts": ("logprobs", *PER_TOKEN)}[reads]
    replacements = [f"NULL::FLOAT[] AS {name}" for name in empty]
    replacements += ["[]::INTEGER[] AS token_ids"] if reads == "texts" else []
    columns = f"* REPLACE ({', '.join(replacements)})" if replacements else "*"
    segments = _children(connection, "segments", trajectories, columns)
    searches = _children(connection, "searches", trajectories)
    keys = [(row["run_id"], row["id"]) for row in trajectories]
    return [
        (_record(row, segments.get(key, []), searches.get(key, [])), row)
        for row, key in zip(trajectories, keys, strict=True)
    ]


Key = tuple[str, str]
"""The run and the id of a trajectory."""


def _children(
    connection: duckdb.DuckDBPyConnection, table: str, trajectories: Sequence[Row], columns: str = "*"
) -> dict[Key, list[Row]]:
    """The rows of `raw.<table>` by trajectory, each in order of position.

    DuckDB skips row groups by the conditions on constants; by the join alone it would read all texts first.
    """
    if not trajectories:
        return {}
    steps = [row["step"] for row in trajectories]
    ids = [row["id"] for row in trajectories]
    near = "step BETWEEN ? AND ?"
    if few := ids if len(ids) <= _FEW else []:
        near += f" AND trajectory_id IN ({', '.join('?' * len(few))})"
    query = (
        f"SELECT {columns} FROM raw.{table} WHERE {near} "
        "AND (run_id, trajectory_id) IN (SELECT unnest(?), unnest(?)) ORDER BY position"
    )
    parameters = [min(steps), max(steps), *few, [row["run_id"] for row in trajectories], ids]
    groups: dict[Key, list[Row]] = {}
    for row in rows(connection, query, parameters):
        groups.setdefault((row["run_id"], row["trajectory_id"]), []).append(row)
    return groups


def rows(
    connection: duckdb.DuckDBPyConnection,
    query: str,
    parameters: Sequence[object] | Mapping[str, object] = (),
) -> list[Row]:
    """The rows of a query as dicts by column name."""
    arguments = dict(parameters) if isinstance(parameters, Mapping) else list(parameters)
    cursor = connection.execute(query, arguments)
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _record(row: Row, segments: list[Row], searches: list[Row]) -> Record:
    return Record(
        _trajectory(row, segments, searches),
        _score(row),
        **{name: _per_token(segments, name) for name in PER_TOKEN},
        left_out=bool(row["left_out"]),
    )


def _trajectory(row: Row, segments: Iterable[Row], searches: Iterable[Row]) -> Trajectory:
    question = Question(
        id=row["question_id"],
        text=row["question"],
        golden_answers=tuple(row["golden_answers"]),
        data_source=row["data_source"],
        split=row["split"],
        prompt=tuple(json.loads(row["prompt"])),
        metadata=json.loads(row["metadata"]),
    )
    fields = {name: row[name] for name in ("step", "phase", *_OF_TRAJECTORY[1:])}
    return Trajectory(
        question, [_segment(row) for row in segments], [_search(row) for row in searches], **fields
    )


def _segment(row: Row) -> Segment:
    return Segment(
        row["kind"], tuple(row["token_ids"]), row["text"], row["turn"], tuple(row["logprobs"] or ())
    )


def _search(row: Row) -> Search:
    hits = tuple(
        Hit(Passage(hit["passage_id"], hit["contents"], hit["url"]), hit["score"]) for hit in row["hits"]
    )
    return Search(hits=hits, **{name: row[name] for name in _OF_SEARCH})


def _score(row: Row) -> Score | None:
    if row["reward"] is None:
        return None
    per_turn = row["per_turn"]
    return Score(row["reward"], dict(row["parts"]), None if per_turn is None else tuple(per_turn))


def _per_token(segments: list[Row], name: str) -> list[float] | None:
    if all(segment[name] is None for segment in segments):
        return None
    return [value for row in segments for value in row[name] or [0.0] * len(row["token_ids"])]
