"""Metrics over steps, of several runs, with the steps at which watches fired; verdicts over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import duckdb

from srl.errors import UserError, nearest
from srl.store import rows
from srl.store.verdict import VERDICTS

FAVOURITES = ("val/em", "test/em", "train/em", "critic/score/mean")
"""The metrics drawn by default: the first that exists."""

_LISTED = 12


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run in one phase; `steps` increase, and there is one value for each.

    `marks` are the steps at which watches of the run fired, each with their names.
    """

    run_id: str
    phase: str
    metric: str
    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    marks: tuple[tuple[int, str], ...] = ()


def short_name(run_id: str) -> str:
    """A run's name without its leading date."""
    stamp, _, rest = run_id.partition("-")
    return rest if rest and stamp.endswith("Z") and "T" in stamp else run_id


def metric_names(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Every metric that a run of this connection has, in order."""
    return [row["name"] for row in rows(connection, "SELECT DISTINCT name FROM metrics ORDER BY name")]


def curve(connection: duckdb.DuckDBPyConnection, metric: str | None = None) -> list[Series]:
    """`metric` over the steps: one series for each run and phase that has it, in the order of their start.

    Without `metric`, the first of `FAVOURITES` that exists. Raises UserError where no run has a finite value
    of the metric.
    """
    names = metric_names(connection)
    metric = metric or next((name for name in (*FAVOURITES, *names) if name in names), FAVOURITES[0])
    series = curves(connection, [metric]).get(metric)
    if series:
        return series
    if metric in names:
        raise UserError(f"{metric!r} has no finite value to draw", key="--metric")
    examples = ", ".join(names[:_LISTED]) + (", …" if len(names) > _LISTED else "")
    raise UserError(
        f"no metric {metric!r}: there are {examples or 'none'}{nearest(metric, names)}", key="--metric"
    )


def curves(connection: duckdb.DuckDBPyConnection, metrics: Sequence[str]) -> dict[str, list[Series]]:
    """Those of `metrics` that a run has, in this order, each with the series of `curve`; by one query.

    A label is the run's name without its date, and the phase where there are several.
    """
    query = """
        SELECT name, run_id, phase, list(step ORDER BY step) AS steps, list(value ORDER BY step) AS values
        FROM metrics JOIN runs USING (run_id) WHERE list_contains(?, name) AND isfinite(value)
        GROUP BY name, run_id, phase, started ORDER BY started, run_id, phase
    """
    marks: dict[str, tuple[tuple[int, str], ...]] = defaultdict(tuple)
    for row in rows(connection, _FIRED):
        marks[row["run_id"]] += ((row["step"], row["names"]),)
    by_name: dict[str, list[Series]] = {name: [] for name in metrics}
    table = rows(connection, query, [list(metrics)])
    phases = {name: {row["phase"] for row in table if row["name"] == name} for name in metrics}
    for row in table:
        run, phase, name = row["run_id"], row["phase"], row["name"]
        label = short_name(run) + (f" {phase}" if len(phases[name]) > 1 else "")
        values = tuple(row["steps"]), tuple(row["values"])
        by_name[name].append(Series(run, phase, name, label, *values, marks[run]))
    return {name: series for name, series in by_name.items() if series}


_FIRED = """
SELECT run_id, step, string_agg(DISTINCT watch, ', ' ORDER BY watch) AS names
FROM watches GROUP BY run_id, step ORDER BY run_id, step
"""


def verdicts_over_steps(
    connection: duckdb.DuckDBPyConnection,
) -> dict[str, tuple[list[int], dict[str, list[float]]]]:
    """By phase: the steps, and of each verdict that occurs its share of the trajectories of each step."""
    counts = ", ".join(f"avg((verdict = '{name}')::INTEGER) AS \"{name}\"" for name in VERDICTS)
    query = f"""
        SELECT phase, step, {counts} FROM trajectories WHERE verdict IS NOT NULL
        GROUP BY phase, step ORDER BY phase, step
    """
    phases: dict[str, tuple[list[int], dict[str, list[float]]]] = {}
    for row in rows(connection, query):
        steps, shares = phases.setdefault(row["phase"], ([], {name: [] for name in VERDICTS}))
        steps.append(row["step"])
        for name, values in shares.items():
            values.append(row[name])
    return {
        phase: (steps, {name: values for name, values in shares.items() if any(values)})
        for phase, (steps, shares) in phases.items()
    }
