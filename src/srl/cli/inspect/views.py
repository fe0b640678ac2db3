"""`srl inspect runs`, `trajectories`, `show`, `curve`, `sql` and `web`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import (
    Json,
    Limit,
    OfPhase,
    Run,
    RunOption,
    Sort,
    Steps,
    Trajectory,
    Where,
    app,
    of_run,
    paths,
    print_rows,
    read,
    read_holding,
)
from srl.cli.options import exclude

if TYPE_CHECKING:
    import duckdb

LEAST = ("hops", "source", "phase", "searches", "gold", "reward")
"""Columns of a listing that a narrow terminal leaves out first."""
QUERY_S = 600.0
"""Seconds of a query: a program that asks too much gets an answer and not a process that never ends."""


@app.command()
def runs(json: Json = False) -> None:
    """List the runs of the workspace with their status and results.

    \b
    Example:
      srl inspect runs
    """
    from srl.browse.runs import HEADINGS, OF_EVALUATIONS
    from srl.browse.runs import runs as all_runs
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    workspace.find_run("last")
    table = read([workspace.runs], all_runs)
    unused = {name for name in OF_EVALUATIONS if all(row[name] is None for row in table)}
    print_rows(table, json, {n: head for n, head in HEADINGS.items() if n not in unused})


@app.command()
def trajectories(
    run: Run = "last",
    steps: Steps = None,
    phase: OfPhase = None,
    em: Annotated[str | None, typer.Option(metavar="X", help="Exact match: 0, 1, or '<1'.")] = None,
    verdict: Annotated[str | None, typer.Option(help="correct, reader, retriever, no search, …")] = None,
    contains: Annotated[
        str | None, typer.Option(help="Only if the question, the text or a query contains this.")
    ] = None,
    where: Where = None,
    sort: Sort = "-step",
    limit: Limit = 20,
    json: Json = False,
) -> None:
    """List trajectories, the latest first.

    \b
    Example:
      srl inspect trajectories last --phase val --em 0 --where "hops = 2" --sort -searches
    """
    from srl.browse.filters import Filter, condition
    from srl.browse.listing import HEADINGS, page

    chosen, values = Filter(steps=steps, phase=phase, em=em, verdict=verdict, contains=contains).where()
    more, _ = condition(where)
    conditions = f"{chosen} AND {more}", values
    table = read(paths([run]), lambda log: page(log, conditions, sort, limit or None)).rows
    if not table:
        output.note("no matching trajectory; try fewer filters")
        return
    print_rows(table, json, of_run(run) | HEADINGS, least=LEAST)
    if len(table) == limit and not json:
        output.note(f"first {limit} rows; --limit 0 lists all; `srl inspect show ID` shows one")


@app.command()
def show(
    trajectory: Trajectory,
    run: RunOption = "last",
    group: Annotated[
        bool, typer.Option("--group", help="All samples of its question in its step, a row each.")
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Its tokens with their mask, log-probs and advantages.")
    ] = False,
    json: Json = False,
) -> None:
    """Show one trajectory: text of the policy, observations, searches and rewards.

    By default it is that of the latest run that has the id. Lines with a bold bar are written by the policy;
    dim lines are only read by it, and masked. With --tokens, `sampler` and `trainer` are log-probs.

    \b
    Example:
      srl inspect show 0bdf61
      srl inspect show 0bdf61 --group
    """
    from srl.browse.render import render
    from srl.browse.transcript import as_json, transcript

    exclude({"--group": group, "--tokens": tokens}, "one lists the samples, the other the tokens")
    if group:
        _show_group(trajectory, run, json)
    elif tokens:
        _show_tokens(trajectory, run, json)
    else:
        shown = read_holding(run, lambda path, log: transcript(log, trajectory))
        if json:
            output.print_rows([as_json(shown)])
        else:
            render(output.stdout(), shown)


def _show_group(trajectory: str, run: str, json: bool) -> None:
    from srl.browse.groups import HEADINGS, group_of, in_words, summary

    samples = [summary(sample) for sample in read_holding(run, lambda path, log: group_of(log, trajectory))]
    first = samples[0]
    if not json:
        place = f"{first['run_id']}, {first['phase']} step {first['step']}"
        output.line(f"question  {first['question']}  ({first['question_id']})")
        output.line(f"gold      {' | '.join(first['golden_answers'])}")
        output.line(f"group     {place}: {in_words(samples)}\n")
    print_rows(samples, json, HEADINGS, least=("tokens", "end"))


def _show_tokens(trajectory: str, run: str, json: bool) -> None:
    from srl.browse.token_text import token_rows, tokenizer_of
    from srl.browse.transcript import transcript

    def read_tokens(path: Path, log: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
        [(model,), *_] = log.execute("SELECT model FROM runs").fetchall()
        return token_rows(transcript(log, trajectory), tokenizer_of(path, model or ""))

    table = read_holding(run, read_tokens)
    print_rows(table, json, {name: name for name in table[0]} if table else {})


@app.command()
def curve(
    runs: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN...", help="Runs; default: `last`.", show_default=False),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to draw (repeatable).", show_default="val/em")
    ] = None,
    json: Json = False,
) -> None:
    """Show metrics over steps, for one or several runs, with the steps at which watches fired.

    \b
    Example:
      srl inspect curve last --metric val/em --metric response_length/mean
    """
    from srl.browse.curve import curve as series_of
    from srl.browse.formatting import bars

    names: list[str | None] = [*metric] if metric else [None]
    run_paths = paths(runs or ["last"], trained=runs in (None, [], ["last"]))
    curves = read(run_paths, lambda log: [run for name in names for run in series_of(log, name)])
    if json:
        output.print_rows(curves)
        return
    rows = []
    for run in curves:
        best, fired = max(run.values), ", ".join(f"{names} at {step}" for step, names in run.marks)
        first, last, most = (f"{value:.6g}" for value in (run.values[0], run.values[-1], best))
        at = run.steps[run.values.index(best)]
        rows.append((run.label, run.metric, bars(run.values), first, last, run.steps[-1], most, at, fired))
    output.table(_CURVES, rows, one_line=True)


_CURVES = (
    "run", "metric", "over the steps", "first", "last", "at step", "highest", "at step", "watches",
)  # fmt: skip


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help="One read-only query in DuckDB's SQL.", show_default=False)],
    runs: Annotated[
        list[str] | None,
        typer.Option("--run", metavar="RUN", help="Run (repeatable); `all`: every run.", show_default="last"),
    ] = None,
    json: Json = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    unsafe: Annotated[
        bool, typer.Option("--unsafe", help="Allow other statements and files: EXPLAIN, COPY, read_csv, SET.")
    ] = False,
) -> None:
    """Query the log with SQL.

    Tables: runs, steps, metrics, trajectories, segments, searches, hits, rewards, watches.
    `DESCRIBE hits` lists the columns of one; docs/inspect.md has queries to begin with. A query can read only
    the log, and takes 10 minutes at most.

    \b
    Example:
      srl inspect sql "SELECT searches, avg(em) FROM trajectories GROUP BY searches ORDER BY searches"
    """
    from srl.browse.formatting import csv_text
    from srl.browse.sql import sql as ask

    exclude({"--json": json, "--csv": csv}, "both say how rows are printed")
    logs = paths(runs or ["last"])
    answer = read(logs, lambda log: ask(log, query, unsafe=unsafe), sealed=not unsafe, seconds=QUERY_S)
    if csv:
        output.verbatim(csv_text(answer.columns, answer.rows))
    else:
        print_rows(answer.records(), json, {name: name for name in answer.columns}, None)


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
    from srl.workspace import Workspace

    serve_pages(Workspace.resolve(), port, lambda url: output.line(url, flush=True))
