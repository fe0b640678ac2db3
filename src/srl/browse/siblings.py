"""The trajectories of one question: of one step side by side, and of all steps and runs."""

from __future__ import annotations

from typing import Any

import duckdb

from srl.browse.transcript import Transcript, transcripts
from srl.store import rows

MOST = 1000
"""The most trajectories of one question that `history` returns."""


def siblings(connection: duckdb.DuckDBPyConnection, row: dict[str, Any]) -> list[Transcript]:
    """The group of the trajectory `row`: all samples of its question in its step, in their order."""
    where = "run_id = ? AND step = ? AND phase = ? AND question_id = ?"
    found = transcripts(connection, where, [row[name] for name in ("run_id", "step", "phase", "question_id")])
    return sorted(found, key=lambda shown: shown.row["sample"])


def history(connection: duckdb.DuckDBPyConnection, question_id: str) -> list[dict[str, Any]]:
    """The trajectories of one question in all runs of the connection, by start of the run and by step.

    Each has its run, place, outcome and `queries`, in the order asked; at most `MOST`.
    """
    query = f"""
        WITH chosen AS (
            SELECT run_id, id, step, phase, sample, position, em, reward, verdict, answer, searches, tokens
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
