"""`srl eval rescore`: another measure of the answers in a run's log."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from srl.cli.options import Json


def rescore(
    run: Annotated[
        str, typer.Argument(help="Run, of an evaluation or of training: `last`, its name, or the directory.")
    ],
    reward: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="Reward by name or module:Class (repeatable)."),
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
      srl eval rescore last --reward em --reward my_rewards:Brevity
    """
    from srl.cli.output import note, print_json, progress, show_counted, table
    from srl.plugins.import_path import look_in
    from srl.workspace import Workspace

    look_in(Path.cwd())
    show_counted()
    with progress("starting", passing=True):
        from srl.evaluate.intervals import in_words
        from srl.evaluate.rescore import rescore as compute
    workspace = Workspace.resolve()
    result = compute(workspace.find_run(run), reward)
    before = f"; {result.before:,} were before" if result.before else ""
    note(f"{result.scored:,} trajectories of {result.run} rescored by {result.rewards}{before}")
    if as_json:
        print_json(asdict(result))
        return
    measures = list(result.rows[0].measures) if result.rows else []
    heads = [part for name in ("EM", *measures) for part in (name, "95% interval")]
    rows = [
        [
            row.phase, row.step, f"{row.episodes:,}",
            *(
                text
                for each in (row.em, *row.measures.values())
                for text in (f"{each.mean:.3f}", in_words(each.interval))
            ),
        ]
        for row in result.rows
    ]  # fmt: skip
    table(["phase", "step", "episodes", *heads], rows)
    query = "SELECT rewards, phase, measure, avg(value) FROM rescores GROUP BY ALL"
    note(f"query it: {workspace.command('inspect', 'sql', query, '--run', result.run)}")
