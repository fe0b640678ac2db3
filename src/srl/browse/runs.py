"""The table of a workspace's runs."""

from __future__ import annotations

from typing import Any

import duckdb

from srl.store import rows

HEADINGS = {
    "run_id": "run", "status": "status", "steps": "step", "score": "score", "val_em": "val em",
    "val_step": "at step", "best_val_em": "best", "test_em": "test em", "test_step": "at step",
    "setting": "setting", "eval_em": "eval em", "seconds": "time",
}  # fmt: skip
"""The columns of the table, each with its heading."""

OF_EVALUATIONS = ("setting", "eval_em")
"""Columns that are left out where no run is an evaluation."""

_QUERY = """
WITH val AS (
    SELECT run_id, arg_max(em, step) AS val_em, max(step) AS val_step, max(em) AS best_val_em
    FROM steps WHERE phase = 'val' AND em IS NOT NULL GROUP BY run_id
), test AS (
    SELECT run_id, arg_max(em, step) AS test_em, max(step) AS test_step
    FROM steps WHERE phase = 'test' AND em IS NOT NULL GROUP BY run_id
), train AS (
    SELECT run_id, arg_max(score, step) AS score
    FROM steps WHERE phase = 'train' AND score IS NOT NULL GROUP BY run_id
), evaluation AS (
    SELECT run_id, avg(em) AS eval_em, count(DISTINCT question_id) AS questions
    FROM raw.trajectories WHERE phase = 'eval' GROUP BY run_id
)
SELECT run_id, status, preset, algo, seed, steps, score, val_em, val_step, best_val_em, test_em, test_step,
    eval_em, questions, config ->> '$.setting' AS setting, model, started, written, seconds
FROM runs LEFT JOIN val USING (run_id) LEFT JOIN test USING (run_id) LEFT JOIN train USING (run_id)
    LEFT JOIN evaluation USING (run_id)
ORDER BY started, run_id
"""


def runs(connection: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    """One row a run, in the order of their start: status, steps, latest metrics.

    `score` is the last mean reward in training, `val_em` and `test_em` the last exact match there, of
    `val_step` and `test_step`. An evaluation has a `setting`, the number of `questions` answered so far, and
    their exact match `eval_em`.
    """
    return rows(connection, _QUERY)
