"""`srl eval compare`: compare evaluations on the same questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.browse.formatting import counted
from srl.cli import output
from srl.cli.options import Json, exclude

if TYPE_CHECKING:
    from srl.evaluate.comparison import Measured

_HEADS = (
    "source", "questions", "measure", "run", "value", "95% interval", "minus A", "95% interval", "p", "",
)  # fmt: skip
_MOST = 26


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Evaluations, the first is the baseline: `last`, the beginning or end of a run's name, or "
            "its directory.",
        ),
    ],
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a table in Markdown.")] = False,
    as_json: Json = False,
) -> None:
    """Compare evaluations on the questions that all of them have: EM, F1 and cover-EM by data source.

    Each difference from the first run has an interval and the p-value of a paired randomisation test,
    corrected for the number of tests (Holm); `n.s.` marks those that are not significant. Questions from one
    document count together. Where they come from too few documents, no interval is given.

    \b
    Example:
      srl eval compare 20260102T030405Z last
      srl eval compare runs/a runs/b runs/c --markdown > table.md
    """
    from srl.errors import UserError
    from srl.evaluate.comparison import LEVEL, name_of, read_evaluation
    from srl.evaluate.comparison import compare as compare_runs
    from srl.workspace import Workspace

    exclude({"--markdown": markdown, "--json": as_json}, "both say how the table is written")
    workspace = Workspace.resolve()
    directories = list(dict.fromkeys(workspace.find_run(name).resolve() for name in runs))
    if not 2 <= len(directories) <= _MOST or len(directories) < len(runs):
        raise UserError(f"expected 2 to {_MOST} different runs, found {len(directories)}", key="RUN")
    result = compare_runs([read_evaluation(Path(run)) for run in directories])
    for text in result.notes:
        output.note(f"note: {text}")
    if as_json:
        about = [
            {"run": run.run, "model": run.model, "setting": run.setting, "left_out": more}
            for run, more in zip(result.runs, result.left_out, strict=True)
        ]
        facts = {"questions": result.questions, "runs": about, "tests": result.tests}
        output.print_json(facts | {"rows": result.rows})
        return
    for number, (run, more) in enumerate(zip(result.runs, result.left_out, strict=True)):
        what = ", ".join(filter(None, (run.model, run.setting)))
        suffix = f"; {more:,} further questions are left out" if more else ""
        output.line(f"{'- ' * markdown}{name_of(number)}: {run.run} ({what}){suffix}")
    output.line(f"{'- ' * markdown}{counted(result.questions, 'question')} that all runs have")
    letters = {run.run: name_of(number) for number, run in enumerate(result.runs)}
    cells, before = [], None
    for row in result.rows:
        head = [row.source, f"{row.questions:,}", row.measure]
        labels = ["", "", ""] if head == before and not markdown else head
        cells.append([*labels, *_figures(row, letters[row.run])])
        before = head
    if markdown:
        escaped = [[cell.replace("\\", "\\\\").replace("|", "\\|") for cell in row] for row in cells]
        lines = [f"| {' | '.join(row)} |" for row in (_HEADS, ["---"] * len(_HEADS), *escaped)]
        output.line("\n".join(["", *lines, ""]))
    else:
        output.table(_HEADS, cells)
    output.line(
        f"p: paired randomisation test, corrected for {result.tests} tests (Holm); n.s.: not significant, p "
        f"above {LEVEL}"
    )


def _figures(row: Measured, run: str) -> list[str]:
    from srl.evaluate.intervals import in_words

    cells = [run, f"{row.value:.3f}", in_words(row.interval)]
    if row.difference is None or row.p_corrected is None:
        return [*cells, "", "", "", ""]
    p = f"{row.p_corrected:.3f}" if row.p_corrected >= 0.001 else "<0.001"
    difference = [f"{row.difference:+.3f}", in_words(row.difference_interval, sign="+")]
    return [*cells, *difference, p, "" if row.significant else "n.s."]
