"""`srl inspect export` and `import`: trajectories for other programs, and theirs as a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.inspect.filters import Filters, filtered
from srl.cli.inspect.shared import Phase, Run, app, paths, read
from srl.cli.options import Overwrite, check_new, exclude


class Form(StrEnum):
    """The formats that `export` writes."""

    messages = "messages"
    inspect_eval = "inspect-eval"


_OUT = {Form.messages: Path("messages.parquet"), Form.inspect_eval: Path("inspect-logs")}
"""What `export` writes to unless it is told."""


@app.command()
@filtered("steps", "phase", "source", "em", "reward")
def export(
    run: Run = "last",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write, or new directory for inspect-eval.",
            show_default="messages.parquet or inspect-logs",
        ),
    ] = None,
    form: Annotated[
        Form,
        typer.Option(
            "--format", help="messages: chat messages in Parquet; inspect-eval: logs of Inspect (.eval)."
        ),
    ] = Form.messages,
    overwrite: Overwrite = False,
    *,
    filters: Filters,
) -> None:
    """Write trajectories for other programs: as chat messages, or as logs of Inspect.

    Roles: `assistant` is what the policy wrote, `tool` an observation, `user` feedback. inspect-eval writes a
    file for each step and phase, in which searches are tool calls; `inspect view` shows them. It needs
    inspect_ai. No format has token ids, log-probs and advantages; docs/inspect.md lists what is kept.

    \b
    Example:
      srl inspect export last --phase train --em 1 -o right.parquet
      srl inspect export last --format inspect-eval -o inspect-logs
    """
    from srl.browse.inspect_eval import write_eval_logs
    from srl.browse.messages import write_messages

    chosen = filters.condition()
    write, to = write_messages if form is Form.messages else write_eval_logs, out or _OUT[form]
    exclude(
        {"--format inspect-eval": form is Form.inspect_eval, "--overwrite": overwrite},
        "it writes a new directory",
    )
    check_new(to, overwrite)
    count = read(paths([run]), lambda log: write(log, chosen, to))
    output.note(f"{count:,} trajectories")
    output.line(to)


@app.command("import")
def import_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="verl's trainer.rollout_data_dir or validation_data_dir.")
    ],
    phase: Annotated[Phase, typer.Option(help="The phase of the episodes.")] = Phase.train,
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
    from srl.workspace import Workspace

    check_dump(directory)
    run = Workspace.resolve().new_run("verl", "dump", 0)
    about = RunInfo(
        run.name, "verl", "dump", config={"imported": str(directory)}, srl_version=__version__,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )  # fmt: skip
    with LogWriter(run / "log", about) as log:
        count = import_dump(directory, log, phase.value)
    output.note(f"{count:,} trajectories; srl inspect trajectories {run.name}")
    output.line(run.name)
