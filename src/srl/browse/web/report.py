"""A chosen part of a run as one file that opens with no network: the views of the pages, no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import duckdb

from srl.browse.curve import curves, verdicts_over_steps
from srl.browse.diff import run_of
from srl.browse.groups import KEYS, group_of, in_words, summary
from srl.browse.listing import facets, page
from srl.browse.trajectories import Filter
from srl.browse.transcript import transcripts
from srl.browse.web.charts import PANELS, charts, verdict_charts
from srl.browse.web.rendering import standalone
from srl.browse.why import why
from srl.errors import UserError
from srl.files import atomic_file
from srl.store import rows

_AT_ONCE = 8
"""Groups that are read from the log at once."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The trajectories of a report: the first that match `filter`, or the samples of one group.

    `group` is the id of a trajectory in it, or the beginning of one.
    """

    filter: Filter = field(default_factory=Filter)
    sort: str = "-step"
    limit: int = 20
    group: str | None = None


def write_report(log: duckdb.DuckDBPyConnection, run: Path, choice: Choice, out: Path) -> int:
    """Write the report on the run in the directory `run` to `out`; the number of trajectories in it.

    Raises UserError if no trajectory is chosen.
    """
    run_id = run_of(log, run)
    if choice.group is not None:
        chosen = [one.row for one in group_of(log, choice.group)]
        words = f"The {len(chosen)} samples of one group."
    else:
        chosen = page(log, choice.filter, choice.sort, choice.limit).rows
        total = facets(log, choice.filter).total
        words = f"{len(chosen):,} of {total:,} trajectories{_words(choice.filter)}, sorted by {choice.sort}."
    if not chosen:
        raise UserError("no trajectory matches, so there is nothing to report", hint="try fewer filters")
    try:
        reason, too_short = why(log, run_id), ""
    except UserError as error:
        reason, too_short = None, str(error)
    values = {
        "row": rows(log, "FROM runs")[0], "counts": facets(log, Filter()), "why": reason,
        "charts": [*charts(curves(log, PANELS)), *verdict_charts(verdicts_over_steps(log))],
        "too_short": too_short, "chosen": words, "rows": chosen, "groups": _groups(log, chosen),
        "shown_ids": {row["id"] for row in chosen},
    }  # fmt: skip
    with atomic_file(out, "w") as file:
        file.writelines(standalone("report.html", values))
    return len(chosen)


def _words(chosen: Filter) -> str:
    values = {one.name: getattr(chosen, one.name) for one in fields(chosen)}
    words = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
    return f" ({words})" if words else ""


def _groups(log: duckdb.DuckDBPyConnection, chosen: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The groups of the chosen trajectories in their order: a row a sample, the chosen ones in full."""
    ids = {row["id"] for row in chosen}
    keys = list(dict.fromkeys(tuple(row[name] for name in KEYS) for row in chosen))
    for start in range(0, len(keys), _AT_ONCE):
        batch = keys[start : start + _AT_ONCE]
        places = ", ".join([f"({', '.join('?' * len(KEYS))})"] * len(batch))
        condition = f"({', '.join(KEYS)}) IN ({places})"
        listed = transcripts(log, condition, [value for key in batch for value in key])
        listed.sort(key=lambda one: one.row["sample"])
        for key in batch:
            samples = [one for one in listed if tuple(one.row[name] for name in KEYS) == key]
            summaries = [summary(one) for one in samples]
            yield {
                "samples": summaries, "words": in_words(summaries),
                "shown": [pair for pair in zip(samples, summaries, strict=True) if pair[1]["id"] in ids],
            }  # fmt: skip
