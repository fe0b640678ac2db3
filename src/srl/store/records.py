"""Records back out of the log, as they were written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import duckdb

from srl.store.rows import Record
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

Row = dict[str, Any]


def read_records(
    connection: duckdb.DuckDBPyConnection, where: str = "true", parameters: Sequence[object] = ()
) -> list[Record]:
    """The records of the trajectories for which the SQL condition `where` holds, in the order written.

    Where the log has advantages or returns, tokens that the policy did not write have 0.
    """
    chosen = f"(SELECT run_id, id AS trajectory_id FROM trajectories WHERE {where})"
    trajectories = rows(
        connection,
        f"FROM raw.trajectories WHERE (run_id, id) IN {chosen} ORDER BY run_id, step, phase, position",
        parameters,
    )
    children = {
        table: _by_trajectory(
            rows(
                connection,
                f"FROM raw.{table} WHERE (run_id, trajectory_id) IN {chosen} ORDER BY position",
                parameters,
            )
        )
        for table in ("segments", "searches")
    }
    return [
        _record(row, *(children[table].get((row["run_id"], row["id"]), []) for table in children))
        for row in trajectories
    ]


def rows(connection: duckdb.DuckDBPyConnection, query: str, parameters: Sequence[object] = ()) -> list[Row]:
    """The rows of a query, each with its columns by name."""
    cursor = connection.execute(query, list(parameters))
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _by_trajectory(found: list[Row]) -> dict[tuple[str, str], list[Row]]:
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in found:
        grouped.setdefault((row["run_id"], row["trajectory_id"]), []).append(row)
    return grouped


def _record(row: Row, segments: list[Row], searches: list[Row]) -> Record:
    trajectory = Trajectory(
        question=_question(row),
        segments=[_segment(segment) for segment in segments],
        searches=[_search(search) for search in searches],
        **{name: row[name] for name in ("end", "answer", "sample", "step", "phase", "attempt")},
        **{name: row[name] for name in ("valid_actions", "valid_searches", "think_is_open")},
    )
    return Record(
        trajectory, _score(row), _per_token(segments, "advantages"), _per_token(segments, "returns")
    )


def _question(row: Row) -> Question:
    return Question(
        id=row["question_id"],
        text=row["question"],
        golden_answers=tuple(row["golden_answers"]),
        data_source=row["data_source"],
        split=row["split"],
        prompt=tuple(json.loads(row["prompt"])),
        metadata=json.loads(row["metadata"]),
    )


def _segment(row: Row) -> Segment:
    return Segment(
        row["kind"], tuple(row["token_ids"]), row["text"], row["turn"], tuple(row["logprobs"] or ())
    )


def _search(row: Row) -> Search:
    hits = tuple(Hit(Passage(hit["passage_id"], hit["contents"]), hit["score"]) for hit in row["hits"])
    names = ("query", "status", "latency_s", "attempts", "error", "index_digest", "turn")
    return Search(hits=hits, retriever=row["retriever"] or "", **{name: row[name] for name in names})


def _score(row: Row) -> Score | None:
    if row["reward"] is None:
        return None
    per_turn = row["per_turn"]
    return Score(row["reward"], dict(row["parts"]), None if per_turn is None else tuple(per_turn))


def _per_token(segments: list[Row], name: str) -> list[float] | None:
    if all(segment[name] is None for segment in segments):
        return None
    return [value for row in segments for value in row[name] or [0.0] * len(row["token_ids"])]
