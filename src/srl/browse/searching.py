"""How the searches went, by step or otherwise: outcomes, latency, repeated queries, evidence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import duckdb

from srl.browse.trajectories import Filter
from srl.errors import UserError, nearest
from srl.store import rows

GROUPS = {"step": "phase, step", "phase": "phase", "retriever": "retriever", "source": "data_source",
          "run": "run_id"}  # fmt: skip
"""What searches are counted by, and the columns of it."""

_QUERY = """
SELECT {columns}, count(*) AS searches, {episodes} AS episodes,
    count(*) FILTER (status = 'empty') AS empty,
    count(*) FILTER (status = 'rejected') AS rejected,
    count(*) FILTER (status IN ('timed_out', 'refused', 'failed')) AS failed,
    count(*) FILTER (attempts > 1) AS retried,
    count(*) FILTER (repeated) AS repeated,
    avg((gold_rank IS NOT DISTINCT FROM 1)::INTEGER) FILTER (answered) AS evidence_first,
    avg(showed::INTEGER) FILTER (answered) AS evidence_shown,
    avg((gold_rank IS NOT NULL AND NOT showed)::INTEGER) FILTER (answered) AS evidence_cut,
    quantile_cont(latency_s, 0.5) AS p50_s, quantile_cont(latency_s, 0.95) AS p95_s,
    quantile_cont(latency_s, 0.99) AS p99_s, max(latency_s) AS max_s
FROM (
    SELECT *, coalesce(gold_rank <= coalesce(shown, hits), false) AS showed,
        coalesce(judged, true) AND status IN ('ok', 'empty') AS answered
    FROM {chosen}
)
GROUP BY {columns} ORDER BY {columns}
"""


def searches(connection: duckdb.DuckDBPyConnection, chosen: Filter, by: str = "step") -> list[dict[str, Any]]:
    """A row for each value of `by`, a key of `GROUPS`, over the searches of the trajectories `chosen`.

    `repeated` counts queries that the same episode had asked before (case and outer spaces ignored).
    `evidence_first` is the share of answered searches whose first passage contains a golden answer,
    `evidence_shown` that of which a shown one does, `evidence_cut` that of which only one that did not fit
    does. Latency is in seconds, with retries.
    """
    if by not in GROUPS:
        raise UserError(f"--by {by}: expected one of {', '.join(GROUPS)}{nearest(by, tuple(GROUPS))}")
    found, parameters = _chosen(chosen, by)
    episodes = "count(DISTINCT (run_id, trajectory_id))" if by == "retriever" else _FIRST
    query = _QUERY.format(columns=GROUPS[by], chosen=found, episodes=episodes)
    return rows(connection, query, parameters)


_FIRST = "count(*) FILTER (position = 0)"
"""The episodes that searched: each has one first search, and all its searches in the same group."""


def _chosen(chosen: Filter, by: str) -> tuple[str, list[object]]:
    """SQL for the searches of the trajectories `chosen`, and its parameters.

    Conditions that the searches meet themselves are not left to the join, which costs more than the counting.
    """
    near, values = Filter(steps=chosen.steps, phase=chosen.phase).where()
    found = f"(SELECT * FROM searches WHERE {near})"
    if by != "source" and replace(chosen, steps=None, phase=None) == Filter():
        return found, values
    where, parameters = chosen.where()
    of = f"(SELECT run_id, id AS trajectory_id, data_source FROM trajectories WHERE {where})"
    return f"{found} JOIN {of} USING (run_id, trajectory_id)", [*values, *parameters]


def failures(connection: duckdb.DuckDBPyConnection, chosen: Filter, limit: int) -> list[dict[str, Any]]:
    """The searches that failed, the latest first: place, status, attempts, latency, query and error."""
    where, parameters = chosen.where()
    query = f"""
        SELECT run_id, trajectory_id AS id, step, phase, turn, retriever, status, attempts, latency_s, query,
            error
        FROM searches WHERE status IN ('rejected', 'timed_out', 'refused', 'failed')
            AND (run_id, trajectory_id) IN (SELECT run_id, id FROM trajectories WHERE {where})
        ORDER BY step DESC, run_id, trajectory_id, position LIMIT {int(limit)}
    """
    return rows(connection, query, parameters)
