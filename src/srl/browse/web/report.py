"""A chosen part of a run as one file that opens with no network: the views of the pages, no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import duckdb

from srl.browse.curve import curves, verdicts_over_steps
from srl.browse.diff import run_of
from srl.browse.filters import Filter, condition, facets
from srl.browse.formatting import counted
from srl.browse.groups import KEYS, in_words, summary
from srl.browse.listing import page
from srl.browse.transcript import transcripts
from srl.browse.web.charts import PANELS, charts, verdict_charts
from srl.browse.web.rendering import standalone
from srl.browse.why import why
from srl.errors import UserError
from srl.files import atomic_file
from srl.store import rows

_AT_ONCE = 8
"""Groups that are read from the log at once."""


def write_report(
    log: duckdb.DuckDBPyConnection,
    run: Path,
    out: Path,
    where: str | None = None,
    sort: str = "-step",
    limit: int = 20,
) -> int:
    """Write the report on the run in the directory `run` to `out`; the number of trajectories in it.

    They are the first that satisfy the SQL condition `where`. Raises UserError if none does.
    """
    run_id, matches = run_of(log, run), condition(where)
    rows_chosen = page(log, matches, sort, limit).rows
    if not rows_chosen:
        raise UserError("no trajectory matches, so there is nothing to report", key="--where")
    [(total,)] = log.execute(f"SELECT count(*) FROM trajectories WHERE {matches[0]}").fetchall()
    such = "" if where is None else f" ({where})"
    words = f"{len(rows_chosen):,} of {counted(total, 'trajectory', 'trajectories')}{such}, sorted by {sort}."
    try:
        reason, too_short = why(log, run_id), ""
    except UserError as error:
        reason, too_short = None, str(error)
    values = {
        "row": rows(log, "FROM runs")[0], "counts": facets(log, Filter()), "why": reason,
        "charts": [*charts(curves(log, PANELS)), *verdict_charts(verdicts_over_steps(log))],
        "too_short": too_short, "chosen": words, "rows": rows_chosen, "groups": _groups(log, rows_chosen),
        "shown_ids": {row["id"] for row in rows_chosen},
    }  # fmt: skip
    with atomic_file(out, "w") as file:
        file.writelines(standalone("report.html", values))
    return len(rows_chosen)


def _groups(log: duckdb.DuckDBPyConnection, table: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The groups of the chosen trajectories in their order: a row a sample, the chosen ones in full."""
    ids = {row["id"] for row in table}
    keys = list(dict.fromkeys(tuple(row[name] for name in KEYS) for row in table))
    for start in range(0, len(keys), _AT_ONCE):
        batch = keys[start : start + _AT_ONCE]
        places = ", ".join([f"({', '.join('?' * len(KEYS))})"] * len(batch))
        condition = f"({', '.join(KEYS)}) IN ({places})"
        batch_samples = transcripts(log, condition, [value for key in batch for value in key])
        batch_samples.sort(key=lambda sample: sample.row["sample"])
        for key in batch:
            samples = [sample for sample in batch_samples if tuple(sample.row[name] for name in KEYS) == key]
            summaries = [summary(sample) for sample in samples]
            yield {
                "samples": summaries, "words": in_words(summaries),
                "shown": [pair for pair in zip(samples, summaries, strict=True) if pair[1]["id"] in ids],
            }  # fmt: skip
