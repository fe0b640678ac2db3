"""Metrics over steps, of several runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from srl.browse.watches import Marks, marks
from srl.errors import UserError, nearest
from srl.store import rows

FAVOURITES = ("val/em", "test/em", "train/em", "critic/score/mean")
"""The metrics drawn by default: the first that exists."""

_LISTED = 12


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run in one phase; `steps` increase, and there is one value for each.

    `marks`: the steps at which watches of the run fired.
    """

    run_id: str
    phase: str
    metric: str
    label: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    marks: Marks = ()


def short_name(run_id: str) -> str:
    """A run's name without its leading date."""
    stamp, _, rest = run_id.partition("-")
    return rest if rest and stamp.endswith("Z") and "T" in stamp else run_id


def metric_names(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Every metric that a run of this connection has, in order."""
    return [row["name"] for row in rows(connection, "SELECT DISTINCT name FROM metrics ORDER BY name")]


def curve(connection: duckdb.DuckDBPyConnection, metric: str | None = None) -> list[Series]:
    """`metric` over the steps: one series for each run and phase that has it, in the order of their start.

    Without `metric`, the first of `FAVOURITES` that exists. A label is the run's name without its date, and
    the phase where there are several. Raises UserError where no run has a finite value of the metric.
    """
    metric = metric or _favourite(connection)
    found = curves(connection, [metric]).get(metric)
    if not found:
        known = metric_names(connection)
        raise UserError(_without_values(connection, metric) if metric in known else _unknown(metric, known))
    return found


def _without_values(connection: duckdb.DuckDBPyConnection, metric: str) -> str:
    """Why there is nothing to draw of a metric that is in the log."""
    found = rows(connection, "SELECT value::VARCHAR AS value FROM metrics WHERE name = ?", [metric])
    values = " or ".join(sorted({row["value"] for row in found}))
    return f"{metric!r} has no finite value to draw: it is {values} at all {len(found):,} of its steps"


def curves(connection: duckdb.DuckDBPyConnection, metrics: Sequence[str]) -> dict[str, list[Series]]:
    """Those of `metrics` that a run has, in this order, each with the series of `curve`; by one query."""
    query = """
        SELECT name, run_id, phase, list(step ORDER BY step) AS steps, list(value ORDER BY step) AS values
        FROM metrics JOIN runs USING (run_id) WHERE list_contains(?, name) AND isfinite(value)
        GROUP BY name, run_id, phase, started ORDER BY started, run_id, phase
    """
    found = rows(connection, query, [list(metrics)])
    by_name = {name: [row for row in found if row["name"] == name] for name in metrics}
    marked = marks(connection)
    return {name: _series(name, some, marked) for name, some in by_name.items() if some}


def _series(metric: str, found: Sequence[dict[str, Any]], marked: Mapping[str, Marks]) -> list[Series]:
    several = len({row["phase"] for row in found}) > 1
    return [
        Series(
            row["run_id"],
            row["phase"],
            metric,
            short_name(row["run_id"]) + (f" {row['phase']}" if several else ""),
            tuple(row["steps"]),
            tuple(row["values"]),
            marked.get(row["run_id"], ()),
        )
        for row in found
    ]


def _favourite(connection: duckdb.DuckDBPyConnection) -> str:
    known = metric_names(connection)
    return next((name for name in (*FAVOURITES, *known) if name in known), FAVOURITES[0])


def _unknown(metric: str, known: Sequence[str]) -> str:
    if not known:
        return (
            f"no step with metrics has been written, so there is no {metric!r} to draw; a run that trains "
            "has them after its first step, and an evaluation has none: type srl inspect verdicts"
        )
    listed = ", ".join(known[:_LISTED]) + (", …" if len(known) > _LISTED else "")
    return f"no metric {metric!r}: there are {listed}{nearest(metric, list(known))}"
