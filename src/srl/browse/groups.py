"""The trajectories of one question: its group, which are the samples of one step, and its history."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import duckdb

from srl.browse.formatting import counted
from srl.browse.transcript import Transcript, place_of, transcripts
from srl.store import rows

KEYS = ("run_id", "step", "phase", "question_id")
"""The columns that the samples of one group have in common."""

HEADINGS = {
    "id": "id", "sample": "sample", "em": "em", "reward": "reward", "advantage": "advantage",
    "verdict": "verdict", "end": "end", "tokens": "tokens", "answer": "answer", "queries": "queries",
}  # fmt: skip
"""The columns of a group's table, each with its heading."""

MOST = 1000
"""The most trajectories of one question that `history` returns."""

_COPIED = (
    *KEYS, "id", "question", "golden_answers", "sample", "valid", "em", "f1", "reward", "parts", "verdict",
    "end", "searches", "turns", "tokens", "answer",
)  # fmt: skip


def group_of(connection: duckdb.DuckDBPyConnection, prefix: str) -> list[Transcript]:
    """The group of the trajectory whose id begins with `prefix`. Raises UserError for an unknown id."""
    return group(connection, place_of(connection, prefix))


def group(connection: duckdb.DuckDBPyConnection, row: Mapping[str, Any]) -> list[Transcript]:
    """The group of the trajectory `row`: all samples of its question in its step, in their order."""
    where = " AND ".join(f"{name} = ?" for name in KEYS)
    samples = transcripts(connection, where, [row[name] for name in KEYS])
    return sorted(samples, key=lambda sample: sample.row["sample"])


def summary(transcript: Transcript) -> dict[str, Any]:
    """A sample in one row: scores, the mean and the range of its advantages, answer and queries."""
    values = [value for step in transcript.steps for value in step.advantages]
    return {name: transcript.row[name] for name in _COPIED} | {
        "advantage": fmean(values) if values else None,
        "lowest_advantage": min(values, default=None),
        "highest_advantage": max(values, default=None),
        "queries": [search.query for search in transcript.record.trajectory.searches],
    }


def in_words(samples: Sequence[Mapping[str, Any]]) -> str:
    """How the rewards and advantages of a group, of which these are the summaries, lie, in one line."""
    rewards = [row["reward"] for row in samples if row["reward"] is not None and row["valid"]]
    if not rewards:
        return "no reward"
    text = f"reward {fmean(rewards):.3f}, standard deviation {pstdev(rewards):.3f}, "
    text += counted(len(rewards), "sample")
    with_advantage = [row for row in samples if row["advantage"] is not None]
    if with_advantage and all(
        row["lowest_advantage"] == row["highest_advantage"] == 0 for row in with_advantage
    ):
        text += "; all advantages are 0, so it has no policy gradient"
    elif len(rewards) > 1 and min(rewards) == max(rewards):  # with rewards for turns these may still teach
        text += "; all rewards are equal"
    failed = len(samples) - len(rewards)
    return text + (f"; {failed} without a valid reward" if failed else "")


def history(connection: duckdb.DuckDBPyConnection, question_id: str) -> list[dict[str, Any]]:
    """The trajectories of one question in all runs of the connection, by start of the run and by step.

    Each has the question, its run, place, outcome and `queries`, in the order asked; at most `MOST`.
    """
    query = f"""
        WITH chosen AS (
            SELECT run_id, id, step, phase, sample, position, question, golden_answers, em, reward, verdict,
                answer, searches, tokens
            FROM trajectories WHERE question_id = ?
        )
        SELECT chosen.*, queries FROM chosen JOIN runs USING (run_id) LEFT JOIN (
            SELECT run_id, trajectory_id AS id, list(query ORDER BY position) AS queries
            FROM searches WHERE (run_id, trajectory_id) IN (SELECT run_id, id FROM chosen)
            GROUP BY ALL
        ) USING (run_id, id)
        ORDER BY started, run_id, phase, chosen.step, sample, position LIMIT {MOST}
    """
    return rows(connection, query, [question_id])
