"""`srl eval rescore`: another measure of the answers in a run's log."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli.options import Json

if TYPE_CHECKING:
    from srl.evaluate.rescore import Measured, Rescored, Row


def rescore(
    run: Annotated[
        str, typer.Argument(help="Run, of an evaluation or of training: `last`, its name, or the directory.")
    ],
    reward: Annotated[
        list[str],
        typer.Option(
            metavar="NAME[=WEIGHT]",
            help="Reward by name or module:Class, with its weight in the sum, default 1 (repeatable).",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Compute another measure of the answers in a run's log. Nothing is generated.

    The scores go into the table `rescores` beside the log, which stays as it is; `srl inspect sql` queries
    it. Shown are the old EM and the new measures with their 95% intervals, of the first and the last step of
    each phase. Options of a reward are those of the run's configuration. The same command again computes
    only what the log has got since.

    \b
    Example:
      srl eval rescore last --reward f1
      srl eval rescore last --reward em=0.5 --reward my_rewards:Brevity=0.5
    """
    from srl.cli.output import note, print_json, progress, show_counted
    from srl.plugins.import_path import look_in
    from srl.workspace import Workspace

    look_in(Path.cwd())
    show_counted()
    with progress("starting", passing=True):
        from srl.evaluate.rescore import parse_rewards
        from srl.evaluate.rescore import rescore as compute
    workspace = Workspace.resolve()
    found = compute(workspace.find_run(run), parse_rewards(reward))
    earlier = f"{found.before:,} trajectories of {found.run} were rescored by {found.rewards} before"
    if not found.scored:
        note(f"{earlier}; nothing is new")
    elif found.before:
        note(f"{found.scored:,} more rescored by {found.rewards}; {earlier}")
    else:
        note(f"{found.scored:,} trajectories of {found.run} rescored by {found.rewards}")
    if as_json:
        print_json(_as_json(found))
        return
    _show(found)
    query = "SELECT rewards, phase, measure, avg(value) FROM rescores GROUP BY ALL"
    note(f"query it: {workspace.command('inspect', 'sql', query, '--run', found.run)}")


def _show(found: Rescored) -> None:
    from srl.cli.output import table

    measures = list(found.rows[0].measures) if found.rows else []
    heads = [part for name in ("EM", *measures) for part in (name, "95% interval")]
    table(["phase", "step", "source", "episodes", *heads], [_cells(row) for row in found.rows])


def _cells(row: Row) -> list[object]:
    shown = [part for one in (row.em, *row.measures.values()) for part in _measured(one)]
    return [row.phase, row.step, row.source or "all", f"{row.episodes:,}", *shown]


def _measured(one: Measured) -> tuple[str, str]:
    return (
        f"{one.mean:.3f}",
        "" if one.interval is None else f"{one.interval.low:.3f} to {one.interval.high:.3f}",
    )


def _as_json(found: Rescored) -> dict[str, Any]:
    def of(one: Measured) -> dict[str, Any]:
        return {"mean": one.mean, "interval": one.interval and list(one.interval)}

    rows = [
        {
            "phase": row.phase, "step": row.step, "source": row.source or None, "episodes": row.episodes,
            "em": of(row.em), "measures": {name: of(one) for name, one in row.measures.items()},
        }
        for row in found.rows
    ]  # fmt: skip
    told = {name: getattr(found, name) for name in ("run", "rewards", "scored", "before")}
    return {**told, "rows": rows}
