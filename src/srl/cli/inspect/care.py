"""`srl inspect sizes`, `prune` and `merge`: what a log takes on disk, less of it, and several as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, OfPhase, Run, Steps, Wide, app, paths, print_rows


@app.command()
def sizes(run: Run = "last", json: Json = False, wide: Wide = False) -> None:
    """Show the rows and the bytes on disk of each table of a log.

    `other` is what belongs to no table: parts that were replaced, damaged files. `all` is every run.

    \b
    Example:
      srl inspect sizes last
    """
    from srl.store.reader import existing_logs
    from srl.store.sizes import sizes as of

    logs = [log for path in paths([run]) for log in existing_logs(path)]
    found: list[dict[str, Any]] = [
        {"run_id": log.parent.name, "table": size.table, "rows": size.rows, "bytes": size.bytes}
        for log in logs
        for size in of(log)
    ]
    columns = {"table": "table", "rows": "rows", "size": "size"}
    several = {"run_id": "run"} if len(logs) > 1 else {}
    print_rows([_with_size(row) for row in found] if not json else found, json, several | columns, wide=wide)
    if not json:
        output.note(f"{_size(sum(row['bytes'] for row in found))} on disk")


@app.command()
def prune(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run, as for the other commands.")],
    steps: Steps = None,
    phase: OfPhase = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Only steps that were written longer ago.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the steps that N divides, and the last of each phase."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Prune; without it, only show what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove the trajectories of some steps from a log, with their tokens, searches and passages.

    The steps that meet every condition given are pruned. Their metrics stay, and so do evaluations. Without
    --yes nothing is changed. A log that is being written is refused; a kill leaves it as it was, or pruned.

    \b
    Example:
      srl inspect prune last --steps :900 --keep-every 50
    """
    from srl.errors import UserError
    from srl.store.prune import plan, summed
    from srl.store.prune import prune as remove
    from srl.store.reader import existing_logs

    if (steps, phase, older_than, keep_every) == (None,) * 4:
        raise UserError("which steps? add --steps, --phase, --older-than or --keep-every")
    logs = existing_logs(paths([run])[0])
    if len(logs) > 1:
        raise UserError(f"{run} has {len(logs)} runs; prune one at a time")
    gone = plan(logs[0], _rule(steps, phase.value if phase else None, older_than, keep_every))
    if not gone:
        output.note("no step with trajectories meets these conditions; nothing is pruned")
        return
    found = summed(gone)
    print_rows(found if json else [_with_size(row) for row in found], json, _PRUNE_COLUMNS)
    if yes:
        remove(logs[0], {(one.step, one.phase) for one in gone})
    output.note("pruned" if yes else "nothing is changed; --yes prunes")


_PRUNE_COLUMNS = {
    "phase": "phase", "steps": "steps", "first": "first", "last": "last", "trajectories": "trajectories",
    "size": "about",
}  # fmt: skip


def _rule(steps: str | None, phase: str | None, older_than: float | None, keep_every: int | None) -> Any:
    from datetime import UTC, datetime, timedelta

    from srl.browse.trajectories import span
    from srl.store.prune import Rule

    before = None
    if older_than is not None:
        try:
            before = (datetime.now(UTC) - timedelta(days=older_than)).replace(tzinfo=None)
        except OverflowError:  # before the year 1: nothing is that old
            before = datetime.min
    return Rule(None if steps is None else span(steps), phase, before, keep_every)


@app.command()
def merge(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Runs, folders of runs, or workspaces.", show_default=False),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New directory.", show_default=False)],
    json: Json = False,
) -> None:
    """Merge the logs of several machines or workspaces into one new workspace.

    Each run keeps its id and gets one finished log. Logs of one run from several machines are united. Two
    different runs of the same id, and a step that two logs of a run have, are refused.

    \b
    Example:
      srl inspect merge node-1/srl-workspace node-2/srl-workspace -o all-runs
    """
    from dataclasses import asdict

    from srl.store.merge import merge_logs

    found = [asdict(one) for one in merge_logs(sources, out)]
    columns = {"run_id": "run", "logs": "logs", "steps": "steps", "trajectories": "trajectories"}
    print_rows(found, json, columns)
    if not json:
        output.note(f"srl --workspace {out} inspect runs")


def _with_size(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"size": _size(row["bytes"])}


def _size(count: int) -> str:
    """Bytes for people: `1.25 GB`, `310 kB`."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} B"
