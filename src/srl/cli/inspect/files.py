"""`srl inspect report`, `export` and `import`: a run as files, and the files of others as a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.browse.formatting import counted
from srl.cli import output
from srl.cli.inspect.shared import Run, Sort, Where, app, paths, read
from srl.cli.options import Overwrite, check_new
from srl.errors import UserError
from srl.trajectory import Phase

if TYPE_CHECKING:
    import duckdb


@app.command()
def report(
    run: Run = "last",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, FILE.html.", show_default=False)
    ] = Path("report.html"),
    where: Where = None,
    sort: Sort = "-step",
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=1000, help="Maximum number of trajectories.")
    ] = 20,
    overwrite: Overwrite = False,
) -> None:
    """Write a chosen part of a run as one HTML file that opens with no network, to keep or to send.

    It has the run with its curves, what `srl inspect why` says, a table of the chosen trajectories, and each
    of them in full, with the group of its question.

    \b
    Example:
      srl inspect report last --where "phase = 'train' AND verdict = 'reader'" -o report.html
    """
    from srl.browse.web.report import write_report

    check_new(out, overwrite)
    [directory] = paths([run])
    count = read([directory], lambda log: write_report(log, directory, out, where, sort, limit))
    output.note(f"{counted(count, 'trajectory', 'trajectories')}, {out.stat().st_size / 1e6:.2f} MB")
    output.line(out)


@app.command()
def export(
    run: Run = "last",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write, FILE.parquet.", show_default=False)
    ] = Path("messages.parquet"),
    where: Where = None,
    overwrite: Overwrite = False,
) -> None:
    """Write trajectories as chat messages in Parquet, for fine-tuning elsewhere.

    Roles: `assistant` is what the policy wrote, `tool` an observation, `user` feedback. Token ids, log-probs
    and advantages are not written; docs/inspect.md lists what is kept.

    \b
    Example:
      srl inspect export last --where "phase = 'train' AND em = 1" -o right.parquet
    """
    from srl.browse.filters import condition
    from srl.browse.messages import write_messages

    check_new(out, overwrite)

    def write_chosen(log: duckdb.DuckDBPyConnection) -> int:
        sql, parameters = condition(where)
        if not log.execute(f"SELECT id FROM trajectories WHERE {sql} LIMIT 1", parameters).fetchall():
            raise UserError("no trajectory matches, so nothing is written", key="--where")
        return write_messages(log, (sql, parameters), out)

    count = read(paths([run]), write_chosen)
    output.note(counted(count, "trajectory", "trajectories"))
    output.line(out)


@app.command("import")
def import_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="verl's trainer.rollout_data_dir or validation_data_dir.")
    ],
    phase: Annotated[Phase, typer.Option(help="The phase of the episodes.")] = "train",
) -> None:
    """Import the generations that verl dumped as a run of the workspace, to look at it like any other.

    A dump has text, answers and scores, but no token ids, log-probs and advantages. Searches are read from
    their tags.

    \b
    Example:
      srl inspect import rollouts
    """
    from datetime import UTC, datetime

    from srl import __version__
    from srl.browse.verl_dump import check_dump, import_dump
    from srl.store import LogWriter, RunInfo
    from srl.workspace import IMPORT, Workspace

    check_dump(directory)
    run = Workspace.resolve().new_run("verl", IMPORT, 0)
    about = RunInfo(
        run.name, "verl", IMPORT, config={"imported": str(directory)}, srl_version=__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    with LogWriter(run / "log", about) as log:
        count = import_dump(directory, log, phase)
    output.note(f"{counted(count, 'trajectory', 'trajectories')}; srl inspect trajectories {run.name}")
    output.line(run.name)
