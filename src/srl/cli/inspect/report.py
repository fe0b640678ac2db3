"""`srl inspect report`: a chosen part of a run as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output
from srl.cli.inspect.filters import Filters, filtered
from srl.cli.inspect.shared import Run, Sort, app, paths, read, read_holding
from srl.cli.options import Overwrite, check_new, exclude

if TYPE_CHECKING:
    import duckdb

_FIRST, _MOST = "-step", 20


@app.command()
@filtered()
def report(
    run: Run = "last",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, FILE.html.", show_default=False)
    ] = Path("report.html"),
    group: Annotated[
        str | None,
        typer.Option(metavar="ID", help="All samples beside this trajectory, instead of a filter."),
    ] = None,
    *,
    filters: Filters,
    sort: Sort = _FIRST,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of trajectories.")
    ] = _MOST,
    overwrite: Overwrite = False,
) -> None:
    """Write a chosen part of a run as one HTML file that opens with no network, to keep or to send.

    It has the run with its curves, what `srl inspect why` says, a table of the chosen trajectories, and each
    of them in full, beside the other samples of its question with their advantages.

    \b
    Example:
      srl inspect report last --phase train --verdict reader -o report.html
    """
    from srl.browse.web.report import Choice, write_report
    from srl.errors import UserError

    check_new(out, overwrite)
    if group is not None and filters != Filters():
        raise UserError("--group takes all samples of one question in one step; leave the other filters out")
    exclude({"--group": group is not None, "--limit": limit != _MOST}, "a group is written whole")
    exclude({"--group": group is not None, "--sort": sort != _FIRST}, "a group has its own order")
    choice = Choice(filters.condition(), sort, limit, group)

    def write(log: duckdb.DuckDBPyConnection, path: Path) -> int:
        return write_report(log, path, choice, out)

    if group is None:
        [directory] = paths([run])
        count = read([directory], lambda log: write(log, directory))
    else:
        count = read_holding(run, write)
    size = out.stat().st_size / 1e6
    output.note(f"{count:,} {'trajectory' if count == 1 else 'trajectories'}, {size:.2f} MB")
    output.line(out)
