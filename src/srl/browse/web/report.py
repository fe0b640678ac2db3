"""A chosen part of a run as one file that opens with no network: the views of the pages, no script."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import duckdb

from srl.browse.curve import curves
from srl.browse.diff import run_of
from srl.browse.groups import KEYS, advantage, group, in_words, summary
from srl.browse.listing import facets, listing
from srl.browse.trajectories import Filter
from srl.browse.transcript import Transcript, transcripts
from srl.browse.web.parts import PANELS, charts, turns
from srl.browse.web.rendering import standalone
from srl.browse.web.seeds import bands
from srl.browse.why import diagnose
from srl.browse.why_report import Section, sections
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
    found, chosen = _chosen(log, choice)
    panels = {name: bands(some, {}) for name, some in curves(log, PANELS).items()}
    values = {
        "row": rows(log, "FROM runs")[0], "counts": facets(log, Filter()), "panels": charts(panels),
        "why": _why(log, run_id), "chosen": chosen, "rows": found, "groups": _groups(log, found),
    }  # fmt: skip
    with atomic_file(out, "w") as file:
        file.writelines(standalone("report.html", values))
    return len(found)


def _chosen(log: duckdb.DuckDBPyConnection, choice: Choice) -> tuple[list[dict[str, Any]], str]:
    """The rows of the table, and in words which they are. Raises UserError."""
    if choice.group is not None:
        found = [one.row for one in group(log, choice.group)]
        return found, f"All {len(found)} samples of one question in one step."
    found = listing(log, choice.filter, choice.sort, choice.limit)
    if not found:
        raise UserError("no trajectory matches, so there is nothing to report; try fewer filters")
    total = facets(log, choice.filter).total
    column = choice.sort.removeprefix("-").replace("_", " ")
    order = f"sorted by {column}{', descending' if choice.sort.startswith('-') else ''}"
    return found, f"{len(found):,} of {total:,} trajectories{_words(choice.filter)}, {order}."


def _words(chosen: Filter) -> str:
    given = {one.name.replace("_", " "): getattr(chosen, one.name) for one in fields(chosen)}
    said = [
        name if value is True else f"{name} {value}"
        for name, value in given.items()
        if value is not None and value is not False
    ]
    return f" ({', '.join(said)})" if said else ""


def _why(log: duckdb.DuckDBPyConnection, run_id: str) -> list[Section]:
    """The report of `why` without its title; of a run that is too short for it, one line."""
    if not rows(log, "SELECT 1 FROM steps WHERE phase = 'train' LIMIT 1"):
        return []
    try:
        found = diagnose(log, run_id)
    except UserError as error:
        return [Section("Not enough to say", (str(error),))]
    outcome, *others = sections(found)
    return [Section("Outcome", outcome.lines), *others]


def _groups(log: duckdb.DuckDBPyConnection, chosen: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The groups of the chosen trajectories in their order, a few at a time: the samples, and the chosen."""
    ids = {row["id"] for row in chosen}
    keys = list(dict.fromkeys(_key(row) for row in chosen))
    condition = f"({', '.join(KEYS)}) IN"
    for start in range(0, len(keys), _AT_ONCE):
        batch = keys[start : start + _AT_ONCE]
        places = ", ".join([f"({', '.join('?' * len(KEYS))})"] * len(batch))
        found = transcripts(log, f"{condition} ({places})", [value for key in batch for value in key])
        for key in batch:
            samples = sorted(
                (one for one in found if _key(one.row) == key), key=lambda one: one.row["sample"]
            )
            yield _group(samples, ids)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in KEYS)


def _group(samples: Sequence[Transcript], ids: set[str]) -> dict[str, Any]:
    """One question of the report: a row for each sample, and the transcripts of the chosen ones."""
    shown = [one for one in samples if one.row["id"] in ids]
    summaries = [summary(one) for one in samples]
    return {
        "samples": summaries,
        "spread": in_words(summaries),
        "ids": {one.row["id"] for one in shown},
        "columns": [{"row": one.row, "advantage": advantage(one), **turns(one)} for one in shown],
    }
