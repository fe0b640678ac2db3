"""How the searches went, by step or otherwise: outcomes, latency, repeated queries, evidence."""

from __future__ import annotations

from typing import Any

import duckdb

from srl.browse.trajectories import Filter
from srl.errors import UserError, nearest
from srl.store import rows
from srl.store.schema import GOLD_RANK_SQL

GROUPS = {"step": "phase, step", "phase": "phase", "retriever": "retriever", "source": "data_source",
          "run": "run_id"}  # fmt: skip
"""What searches are counted by, and the columns of it."""

_QUERY = """
WITH chosen AS (
    SELECT run_id, id AS trajectory_id, data_source, len(golden_answers) > 0 AS judged
    FROM trajectories WHERE {where}
), found AS (
    SELECT {qualified}, searches.run_id, searches.trajectory_id, searches.status, searches.latency_s,
        searches.attempts, coalesce(judged, false) AS judged,
        hash(lower(trim(query))) AS asked, len(hits) AS returned,
        {gold_rank} AS gold_rank, coalesce(gold_rank <= coalesce(shown, returned), false) AS showed
    FROM raw.searches AS searches JOIN chosen USING (run_id, trajectory_id)
)
SELECT {columns}, count(*) AS searches, count(DISTINCT (run_id, trajectory_id)) AS episodes,
    count(*) FILTER (status = 'empty') AS empty,
    count(*) FILTER (status = 'rejected') AS rejected,
    count(*) FILTER (status IN ('timed_out', 'refused', 'failed')) AS failed,
    count(*) FILTER (attempts > 1) AS retried,
    count(*) - count(DISTINCT (run_id, trajectory_id, asked)) AS repeated,
    avg((gold_rank IS NOT DISTINCT FROM 1)::INTEGER) FILTER (judged AND status IN ('ok', 'empty'))
        AS evidence_first,
    avg(showed::INTEGER) FILTER (judged AND status IN ('ok', 'empty')) AS evidence_shown,
    avg((gold_rank IS NOT NULL AND NOT showed)::INTEGER) FILTER (judged AND status IN ('ok', 'empty'))
        AS evidence_cut,
    quantile_cont(latency_s, 0.5) AS p50_s, quantile_cont(latency_s, 0.95) AS p95_s,
    quantile_cont(latency_s, 0.99) AS p99_s, max(latency_s) AS max_s
FROM found GROUP BY {columns} ORDER BY {columns}
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
    where, parameters = chosen.where()
    names = [name.strip() for name in GROUPS[by].split(",")]
    of_search = {"phase": "searches.phase", "step": "searches.step", "run_id": "searches.run_id AS of_run",
                 "retriever": "coalesce(searches.retriever, '') AS retriever"}  # fmt: skip
    columns = ", ".join("of_run" if name == "run_id" else name for name in names)
    qualified = ", ".join(of_search.get(name, name) for name in names)
    query = _QUERY.format(where=where, columns=columns, gold_rank=GOLD_RANK_SQL, qualified=qualified)
    found = rows(connection, query, parameters)
    return [{"run_id" if name == "of_run" else name: value for name, value in row.items()} for row in found]


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
