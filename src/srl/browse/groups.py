"""The trajectories of one question: of one step side by side, its group, and of all steps and runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any

import duckdb

from srl.browse.transcript import Transcript, find, transcripts
from srl.store import rows

KEYS = ("run_id", "step", "phase", "question_id")
"""The columns that the samples of one group have in common."""

MOST = 1000
"""The most trajectories of one question that `history` returns."""

_BEFORE = (
    *("run_id", "id", "step", "phase", "question_id", "question", "golden_answers", "sample", "valid"),
    *("em", "f1", "reward", "parts"),
)
_AFTER = ("verdict", "end", "searches", "turns", "tokens", "answer")


def group(connection: duckdb.DuckDBPyConnection, prefix: str) -> list[Transcript]:
    """The samples beside the trajectory whose id begins with `prefix`, that one included, in their order.

    Raises UserError for an unknown id.
    """
    return siblings(connection, find(connection, prefix))


def siblings(connection: duckdb.DuckDBPyConnection, row: Mapping[str, Any]) -> list[Transcript]:
    """The group of the trajectory `row`: all samples of its question in its step, in their order."""
    where = " AND ".join(f"{name} = ?" for name in KEYS)
    found = transcripts(connection, where, [row[name] for name in KEYS])
    return sorted(found, key=lambda shown: shown.row["sample"])


def summary(shown: Transcript) -> dict[str, Any]:
    """A sample in one row: scores, the mean and the range of its advantages, answer and queries."""
    own = _advantages(shown)
    advantages = {
        "advantage": advantage(shown),
        "lowest_advantage": min(own, default=None),
        "highest_advantage": max(own, default=None),
    }
    queries = [search.query for search in shown.record.trajectory.searches]
    before, after = ({name: shown.row[name] for name in names} for names in (_BEFORE, _AFTER))
    return before | advantages | after | {"queries": queries}


def advantage(shown: Transcript) -> float | None:
    """The mean advantage of the policy's tokens, None where the log has none; with GRPO all are the same."""
    own = _advantages(shown)
    return fmean(own) if own else None


def _advantages(shown: Transcript) -> list[float]:
    return [value for step in shown.steps for value in step.advantages]


def in_words(found: Sequence[Mapping[str, Any]]) -> str:
    """How the rewards and advantages of a group, of which these are the summaries, lie, in one line."""
    rewards = [row["reward"] for row in found if row["reward"] is not None and row["valid"]]
    if not rewards:
        return "no reward"
    failed = len(found) - len(rewards)
    lost = f"; {failed} without a valid reward" if failed else ""
    about = f"reward {fmean(rewards):.3f}, standard deviation {pstdev(rewards):.3f}"
    return f"{about}, {len(rewards)} samples{_agreement(found, rewards)}{lost}"


def _agreement(found: Sequence[Mapping[str, Any]], rewards: Sequence[float]) -> str:
    """Whether a group teaches nothing, by its advantages: equal rewards do not say so of every algorithm."""
    known = [row for row in found if row["advantage"] is not None]
    if known and all(row["lowest_advantage"] == row["highest_advantage"] == 0 for row in known):
        return "; all advantages are 0, so it has no policy gradient"
    return "; all rewards are equal" if len(rewards) > 1 and min(rewards) == max(rewards) else ""


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
