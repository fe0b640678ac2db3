"""`srl inspect`: runs, trajectories, transcripts, verdicts, curves and SQL."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.filters import Filters, filtered
from srl.cli.inspect.shared import (
    Json,
    Run,
    RunOption,
    Sort,
    Wide,
    app,
    of_run,
    paths,
    print_rows,
    read,
    read_holding,
)
from srl.cli.options import Overwrite, check_new, exclude
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.browse.curve import Series


class Group(StrEnum):
    """What `verdicts` groups by."""

    phase = "phase"
    step = "step"
    source = "source"
    hops = "hops"


@app.command()
def runs(json: Json = False, wide: Wide = False) -> None:
    """List the runs of the workspace with their status and results.

    \b
    Example:
      srl inspect runs
    """
    from srl.browse.runs import runs as all_runs
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    workspace.find_run("last")
    found = read([workspace.runs], all_runs)
    unused = {name for name in _OF_EVALUATIONS if all(row[name] is None for row in found)}
    columns = {name: head for name, head in _RUN_COLUMNS.items() if name not in unused}
    print_rows(found, json, columns, wide=wide)


@app.command()
@filtered()
def trajectories(
    run: Run = "last",
    *,
    filters: Filters,
    sort: Sort = "-step",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")
    ] = 20,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """List trajectories, the latest first.

    \b
    Example:
      srl inspect trajectories last --phase val --em 0 --min-searches 2 --sort -searches
    """
    from srl.browse.listing import listing

    found = read(paths([run]), lambda log: listing(log, filters.condition(), sort, limit or None))
    if found:
        print_rows(found, json, of_run(run) | _TRAJECTORY_COLUMNS, wide=wide, least=_LEAST)
    else:
        output.note("no matching trajectory; try fewer filters")
    if found and len(found) == limit and not json:
        output.note(f"first {limit} rows; --limit 0 lists all; `srl inspect show ID` shows one")


@app.command()
def show(
    trajectory: Annotated[str, typer.Argument(metavar="ID", help="Trajectory id, or the beginning of it.")],
    run: RunOption = "last",
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Also print ids, mask, log-probs and advantages of the tokens.")
    ] = False,
    json: Json = False,
) -> None:
    """Show one trajectory: text of the policy, observations, searches and rewards.

    By default it is that of the latest run that has the id. Lines with a bold bar are written by the policy;
    dim lines are only read by it, and masked.

    \b
    Example:
      srl inspect show 0bdf61 --tokens
    """
    from srl.browse.render import render
    from srl.browse.transcript import as_json, transcript

    shown = read_holding(run, lambda log, path: transcript(log, trajectory))
    if json:
        output.print_rows([as_json(shown)])
    else:
        render(output.stdout(), shown, tokens)


@app.command()
@filtered("steps", "phase", "source", "hops")
def verdicts(
    run: Run = "last",
    by: Annotated[Group, typer.Option(help="Group by.")] = Group.phase,
    *,
    filters: Filters,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Count the causes of wrong answers: retriever, reader, no search, no answer, fault.

    `reader`: the passages contained a golden answer, and the policy did not give it. `retriever`: no passage
    contained one.

    \b
    Example:
      srl inspect verdicts last --phase val --by step
    """
    from srl.browse.trajectories import verdicts as count
    from srl.store.verdict import VERDICTS

    column = "data_source" if by is Group.source else by.value
    found = read(paths([run]), lambda log: count(log, filters.condition(), column))
    if found:
        counted = ("steps", *VERDICTS, "total") if by is not Group.step else (*VERDICTS, "total")
        columns = {column: by.value} | {name: name for name in counted}
        print_rows(found, json, columns, wide=wide, least=["total"])
    else:
        output.note("no matching trajectory with golden answers; try fewer filters")


@app.command()
def curve(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs; default: `last`.", show_default=False),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to draw (repeatable).", show_default="val/em")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write a figure: FILE.png, .svg or .pdf.")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Plot metrics over steps, for one or several runs; `!` marks the steps at which a watch fired.

    \b
    Example:
      srl inspect curve last --metric val/em --metric response_length/mean
    """
    from srl.browse.curve import curve as series

    exclude({"--json": json, "--out": out is not None}, "one prints the points, the other draws them")
    check_new(out, overwrite)
    wanted: list[str | None] = [*metric] if metric else [None]
    chosen = paths(runs or ["last"], trained=runs in (None, [], ["last"]))
    found = read(chosen, lambda log: [series(log, name) for name in wanted])
    if out is not None:
        from srl.browse.plot import save_figure

        save_figure(found, out)
        output.line(out)
    elif json:
        print_rows([_series(one) for panel in found for one in panel], True, {})
    else:
        _plot(found)


@app.command()
def watches(run: Run = "last", json: Json = False, wide: Wide = False) -> None:
    """List the watches that fired in a run: when, on which value, and what was done.

    `since` is the first step that may be bad. After a roll-back to a step, the log has later steps only as
    they were made after it.

    \b
    Example:
      srl inspect watches last
    """
    from srl.browse.watches import watches as fired

    found = read(paths([run], trained=run == "last"), fired)
    if found:
        print_rows(found, json, of_run(run) | _WATCH_COLUMNS, wide=wide)
    else:
        output.note("no watch has fired")


@app.command(context_settings={"allow_extra_args": True})
def sql(
    context: typer.Context,
    query: Annotated[str, typer.Argument(help="One read-only query in DuckDB's SQL.", show_default=False)],
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="Run (repeatable); `all`: every run.", show_default="last"),
    ] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    wide: Wide = False,
    unsafe: Annotated[
        bool,
        typer.Option("--unsafe", help="Allow reading and writing other files: COPY, ATTACH, read_csv, SET."),
    ] = False,
) -> None:
    """Query the log with SQL.

    Tables: runs, steps, metrics, trajectories, segments, searches, hits, rewards, rescores, watches.
    `DESCRIBE hits` lists the columns of one. Queries can read only the log, and take 10 minutes at most.

    \b
    Example:
      srl inspect sql "SELECT searches, avg(em) FROM trajectories GROUP BY searches ORDER BY searches"
    """
    from srl.browse.formatting import csv_text
    from srl.browse.sql import sql as ask

    exclude({"--json": json, "--csv": csv}, "both say how rows are printed")
    if context.args:
        raise UserError(
            f'expected one query in quotes; a run is named by --run: srl inspect sql --run {query} "SELECT …"'
        )
    logs = paths(runs or ["last"])
    answer = read(logs, lambda log: ask(log, query, unsafe=unsafe), sealed=not unsafe, seconds=_QUERY_S)
    if csv:
        output.verbatim(csv_text(answer.columns, answer.rows))
    elif answer.is_plan and not json:
        output.verbatim("".join(f"{plan}\n" for _, plan in answer.rows))
    else:
        print_rows(answer.records(), json, {name: name for name in answer.columns}, None, wide=wide)


@app.command()
def web(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 7007,
) -> None:
    """Look at the runs of the workspace in a browser, until interrupted.

    The address is printed when the pages are ready. They show runs while they write, and answer on this
    machine only; nothing is ever written. docs/inspect.md describes them.

    \b
    Example:
      srl inspect web --port 7007
    """
    from srl.browse.web import serve_pages
    from srl.serve.server import bind
    from srl.workspace import Workspace

    with bind("127.0.0.1", port) as listener:
        serve_pages(Workspace.resolve(), listener, lambda url: output.line(url, flush=True))


_QUERY_S = 600.0
"""Seconds of a query: a program that asks too much gets an answer and not a process that never ends."""
_RUN_COLUMNS = {
    "run_id": "run", "status": "status", "steps": "step", "score": "score", "val_em": "val em",
    "val_step": "at step", "best_val_em": "best", "test_em": "test em", "test_step": "at step",
    "setting": "setting", "eval_em": "eval em", "seconds": "time",
}  # fmt: skip
_OF_EVALUATIONS = ("setting", "eval_em")
"""Columns that are left out where no run is an evaluation."""
_TRAJECTORY_COLUMNS = {
    "id": "id", "step": "step", "phase": "phase", "data_source": "source", "hops": "hops", "em": "em",
    "reward": "reward", "searches": "searches", "verdict": "verdict", "answer": "answer",
    "question": "question",
}  # fmt: skip
_WATCH_COLUMNS = {
    "step": "step", "phase": "phase", "watch": "watch", "metric": "metric", "value": "value",
    "bound": "bound", "since": "since", "action": "action", "to_step": "to step",
}  # fmt: skip
_LEAST = ("hops", "source", "phase", "searches", "reward")
"""Columns that a narrow terminal leaves out, in this order."""


def _series(one: Series) -> dict[str, Any]:
    return {"run_id": one.run_id, "phase": one.phase, "metric": one.metric, "steps": one.steps,
            "values": one.values, "watches": dict(one.marks)}  # fmt: skip


def _plot(panels: Sequence[Sequence[Series]]) -> None:
    import sys
    from shutil import get_terminal_size

    from srl.browse.plot import plot

    width = min(get_terminal_size().columns, 120)
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    drawn = [plot(series, width, ascii_only=ascii_only) for series in panels]
    output.line("\n\n".join(drawn))
