"""`srl inspect prune`: a log takes less of the disk."""

from __future__ import annotations

from typing import Annotated

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, OfPhase, Run, Steps, app, paths, print_rows

_COLUMNS = ("phase", "steps", "first", "last", "trajectories")


@app.command()
def prune(
    run: Run,
    steps: Steps = None,
    phase: OfPhase = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the steps that N divides, and the last of each phase."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Prune; without it, only show what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove the trajectories of some steps from a log, with their tokens, searches and passages.

    The steps that meet every condition given are pruned. Their metrics stay, and so do evaluations. Without
    --yes nothing is changed. A log that is being written is refused; a prune that was killed is completed by
    the same command.

    \b
    Example:
      srl inspect prune last --steps :900 --keep-every 50
    """
    from srl.browse.trajectories import span
    from srl.errors import UserError
    from srl.store.prune import plan, summed
    from srl.store.prune import prune as remove
    from srl.store.reader import existing_logs

    if (steps, phase, keep_every) == (None,) * 3:
        raise UserError("which steps? add --steps, --phase or --keep-every")
    log, *others = existing_logs(paths([run])[0])
    if others:
        raise UserError(f"{run} has {1 + len(others)} runs; prune one at a time")
    planned = plan(log, span(steps) if steps else None, phase.value if phase else None, keep_every)
    print_rows(summed(planned), json, {name: name for name in _COLUMNS})
    if yes:
        remove(log, {(row["step"], row["phase"]) for row in planned})
    output.note("pruned" if yes else "nothing is changed; --yes prunes")
