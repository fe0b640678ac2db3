"""What the commands of `srl inspect` share: how runs are named, options, reading a log, printing rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from srl.cli import output
from srl.trajectory import Phase

if TYPE_CHECKING:
    import duckdb

app = typer.Typer(help="Inspect runs: trajectories, curves, SQL.", no_args_is_help=True)

T = TypeVar("T")
Read = Callable[["duckdb.DuckDBPyConnection"], T]


Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Run: `last`, the beginning or end of its name, or its directory."),
]
RunOption = Annotated[str, typer.Option("--run", metavar="RUN", help="Run, as for the other commands.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines, one object per line.")]
Steps = Annotated[str | None, typer.Option(metavar="N|A:B", help="One step, or steps A to B.")]
OfPhase = Annotated[Phase | None, typer.Option(help="Only this phase.")]
Trajectory = Annotated[str, typer.Argument(metavar="ID", help="Trajectory id, or the beginning of it.")]
Where = Annotated[
    str | None,
    typer.Option(metavar="SQL", help="Only trajectories with this: an SQL condition on their columns."),
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")]
Sort = Annotated[str, typer.Option(metavar="COLUMN", help="Sort by a column; -COLUMN: descending.")]


def paths(names: Sequence[str], *, trained: bool = False) -> list[Path]:
    """The directories of the named runs; `all` is every run of the workspace."""
    from srl.workspace import EVALUATION, Workspace

    workspace, besides = Workspace.resolve(), [EVALUATION] if trained else []
    return [workspace.runs if name == "all" else workspace.find_run(name, besides) for name in names]


def of_run(run: str) -> dict[str, str]:
    """The column that says of which run a row is, where rows may be of several."""
    return {"run_id": "run"} if run == "all" else {}


def read_holding(run: str, action: Callable[[Path, duckdb.DuckDBPyConnection], T]) -> T:
    """What `action` returns of the directory of the named run and its log.

    `last` is the latest in which `action` finds its trajectory, so raises no NoTrajectoryError.
    """
    from srl.browse.transcript import NoTrajectoryError
    from srl.errors import UserError
    from srl.store import find_logs
    from srl.workspace import Workspace

    workspace = Workspace.resolve()
    runs = [workspace.find_run(run)]
    if run == "last":
        runs = [path for path in reversed(workspace.all_runs()) if find_logs(path)] or runs
    missing = NoTrajectoryError("no trajectory")
    for path in runs:
        try:
            return read([path], partial(action, path))
        except NoTrajectoryError as error:
            missing = error
    where = "any run of this workspace" if len(runs) > 1 else runs[0].name
    hint = "`srl inspect trajectories RUN` lists those of a run"
    raise UserError(f"{missing} in {where}", hint=hint) from missing


def read(logs: Sequence[Path], action: Read[T], *, sealed: bool = True, seconds: float | None = None) -> T:
    """What `action` returns of a connection to these logs; warnings go to stderr."""
    from srl.store import find_logs, reading
    from srl.store.database import refresh_catalogue

    def warn(text: str) -> None:
        output.warn(f"warning: {text}")

    answer = reading(logs, action, warn=warn, sealed=sealed, seconds=seconds)
    for path in logs:
        for log in find_logs(path):
            refresh_catalogue(log)
    return answer


def print_rows(
    rows: Sequence[dict[str, Any]],
    json: bool,
    columns: dict[str, str],
    digits: int | None = 3,
    *,
    least: Sequence[str] = (),
) -> None:
    """Print JSON lines, or a table of `columns` with their headings.

    On a terminal each row is one line, and columns without room are left out, those in `least` first; a pipe
    gets them all.
    """
    from srl.browse.formatting import cells

    if json:
        output.print_rows(rows)
        return
    output.table(list(columns.values()), cells(rows, columns, digits), one_line=True, least=least)
