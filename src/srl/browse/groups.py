"""The group of a trajectory: the samples of its question in its step, with scores and advantages."""

from __future__ import annotations

from statistics import fmean, pstdev
from typing import Any

import duckdb

from srl.browse.transcript import find_id
from srl.store import rows

_QUERY = """
WITH chosen AS (
    SELECT run_id, step, phase, question_id FROM trajectories WHERE id = ? LIMIT 1
), members AS (
    SELECT trajectories.* FROM trajectories JOIN chosen USING (run_id, step, phase, question_id)
)
SELECT members.run_id, id, step, phase, question_id, question, golden_answers, sample, valid, em, f1, reward,
    parts, advantage, lowest_advantage, highest_advantage, verdict, "end", searches, turns, tokens, answer,
    coalesce(queries, []) AS queries
FROM members
LEFT JOIN (
    SELECT run_id, trajectory_id AS id, list_avg(own) AS advantage, list_min(own) AS lowest_advantage,
        list_max(own) AS highest_advantage
    FROM (
        SELECT run_id, trajectory_id, flatten(list(advantages)) AS own FROM segments
        WHERE advantages IS NOT NULL AND (run_id, trajectory_id) IN (SELECT run_id, id FROM members)
        GROUP BY ALL
    )
) USING (run_id, id)
LEFT JOIN (
    SELECT run_id, trajectory_id AS id, list(query ORDER BY position) AS queries FROM searches
    WHERE (run_id, trajectory_id) IN (SELECT run_id, id FROM members) GROUP BY ALL
) USING (run_id, id)
ORDER BY sample
"""


def group(connection: duckdb.DuckDBPyConnection, prefix: str) -> list[dict[str, Any]]:
    """One row for each sample beside the trajectory whose id begins with `prefix`, that one included.

    `advantage` is the mean over the policy's tokens; with GRPO all of them have the same. Raises UserError
    for an unknown id.
    """
    return rows(connection, _QUERY, [find_id(connection, prefix)])


def in_words(found: list[dict[str, Any]]) -> str:
    """How the rewards of a group lie, in one line."""
    rewards = [row["reward"] for row in found if row["reward"] is not None and row["valid"]]
    if not rewards:
        return "no reward"
    spread = pstdev(rewards)
    agree = "; all agree, so the group has no gradient" if len(rewards) > 1 and spread == 0 else ""
    failed = len(found) - len(rewards)
    lost = f"; {failed} without a valid reward" if failed else ""
    about = f"reward {fmean(rewards):.3f}, standard deviation {spread:.3f}"
    return f"{about}, {len(rewards)} samples{agree}{lost}"
