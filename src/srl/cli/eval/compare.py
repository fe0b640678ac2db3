"""`srl eval compare`: compare evaluations on the same questions."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output
from srl.cli.options import Overwrite, check_new

if TYPE_CHECKING:
    from srl.evaluate.comparison import Comparison, Measured
    from srl.evaluate.intervals import Interval

_MOST = 26


class Format(StrEnum):
    """How a comparison is written."""

    table = "table"
    markdown = "markdown"
    latex = "latex"
    csv = "csv"
    json = "json"


_SUFFIXES = {".md": Format.markdown, ".tex": Format.latex, ".csv": Format.csv, ".json": Format.json}


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN",
            help="Evaluations, the first is the baseline: `last`, the beginning or end of a run's name, or "
            "its directory.",
        ),
    ],
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Output format; default: that of the suffix of --out, or table."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output file; default: stdout.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Compare evaluations on the questions that all of them have: EM, F1 and cover-EM by data source.

    Each difference from the first run has an interval and the p-value of a paired randomisation test,
    corrected for the number of tests (Holm); `n.s.` marks those that are not significant. Questions from one
    document count together. Where they come from too few documents, no interval is given.

    \b
    Example:
      srl eval compare 20260102T030405Z last
      srl eval compare runs/a runs/b runs/c --out table.tex
    """
    from srl.evaluate.comparison import compare as compare_runs
    from srl.evaluate.comparison import read_evaluation

    check_new(out, overwrite)
    found = compare_runs([read_evaluation(run) for run in _find(runs)])
    chosen = form or (_SUFFIXES.get(out.suffix.lower()) if out else None) or Format.table
    for text in found.notes:
        output.note(f"note: {text}")
    if out is not None:
        from srl.files import atomic_file

        with atomic_file(out) as file:
            file.write(_WRITERS[chosen](found))
        output.note(f"wrote {out}")
    elif chosen is Format.table:
        for text in _about(found):
            output.paragraph(text)
        output.table(_HEADS, _cells(found, repeat=False))
        output.paragraph(_legend(found))
    else:
        output.verbatim(_WRITERS[chosen](found))


def _find(names: Sequence[str]) -> list[Path]:
    """The directories of the runs. Raises UserError for fewer than two, and for one that is named twice."""
    from srl.errors import UserError
    from srl.workspace import Workspace

    if not 2 <= len(names) <= _MOST:
        raise UserError(
            f"{len(names)} run{'' if len(names) == 1 else 's'} to compare: give 2 to {_MOST}, as in "
            "`srl eval compare A B`; `srl inspect runs` lists runs"
        )
    workspace = Workspace.resolve()
    found: dict[Path, str] = {}
    for name in names:
        run = workspace.find_run(name).resolve()
        if run in found:
            raise UserError(f"{found[run]!r} and {name!r} are the same run, {run.name}; give different runs")
        found[run] = name
    return list(found)


_HEADS = (
    "source",
    "questions",
    "measure",
    "run",
    "value",
    "95% interval",
    "minus A",
    "95% interval",
    "p",
    "",
)


def _about(found: Comparison) -> list[str]:
    """The runs by their letters, and the questions that are compared."""
    from srl.evaluate.comparison import name_of

    lines = []
    for number, (run, more) in enumerate(zip(found.runs, found.left_out, strict=True)):
        what = ", ".join(filter(None, [run.model, run.setting]))
        left = f"; {more:,} further questions are left out" if more else ""
        lines.append(f"{name_of(number)}: {run.run} ({what}){left}")
    return [*lines, f"{found.questions:,} questions that all runs have"]


def _legend(found: Comparison) -> str:
    from srl.evaluate.comparison import LEVEL

    return (
        f"p: paired randomisation test, corrected for {found.tests} tests (Holm); "
        f"n.s.: not significant, p above {LEVEL}"
    )


def _cells(found: Comparison, *, repeat: bool) -> list[list[str]]:
    """The table as text; with `repeat` the source and the measure stand in every row."""
    cells, before = [], ("", "")
    for row in found.rows:
        source, measure = row.source, row.measure
        heads = [
            source if repeat or source != before[0] else "",
            f"{row.questions:,}" if repeat or source != before[0] else "",
            measure if repeat or (source, measure) != before else "",
        ]
        cells.append(heads + _figures(row))
        before = source, measure
    return cells


def _figures(row: Measured) -> list[str]:
    from srl.evaluate.comparison import name_of

    own = [name_of(row.run), f"{row.value:.3f}", _between(row.interval)]
    if row.test is None or row.p is None:
        return [*own, "", "", "", ""]
    p = f"{row.p:.3f}" if row.p >= 0.001 else "<0.001"
    mark = "" if row.significant else "n.s."
    return [*own, f"{row.test.difference:+.3f}", _between(row.test.interval, "+"), p, mark]


def _between(held: Interval | None, sign: str = "") -> str:
    return "-" if held is None else f"{held.low:{sign}.3f} to {held.high:{sign}.3f}"


def _as_table(found: Comparison) -> str:
    rows = output.aligned([_HEADS, *_cells(found, repeat=False)])
    return "\n".join([*_about(found), *rows, _legend(found)]) + "\n"


def _as_markdown(found: Comparison) -> str:
    def row(cells: Sequence[str]) -> str:
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(escaped)} |"

    lines = [row(_HEADS), row(["---"] * len(_HEADS)), *map(row, _cells(found, repeat=True))]
    about = [f"- {line}" for line in _about(found)]
    return "\n".join([*about, "", *lines, "", _legend(found)]) + "\n"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
    "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"$<$", ">": r"$>$",
    "−": "$-$",
}  # fmt: skip


def _as_latex(found: Comparison) -> str:
    """A `tabular` with the rules of `booktabs`; what the letters mean stands in comments."""

    def cell(text: str) -> str:
        signed = re.sub(r"(?<!\S)-(?=\d)", "−", text)
        return "".join(_LATEX.get(letter, letter) for letter in signed)

    def row(cells: Sequence[str]) -> str:
        return " & ".join(map(cell, cells)) + r" \\"

    body = [row(cells) for cells in _cells(found, repeat=False)]
    comments = [f"% {' '.join(line.split())}" for line in (*_about(found), _legend(found))]
    table = [r"\begin{tabular}{lrllrrrrrl}", r"\toprule", row(_HEADS), r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*comments, *table, r"\end{tabular}"]) + "\n"


def _as_csv(found: Comparison) -> str:
    import csv
    from io import StringIO

    from srl.evaluate.comparison import as_records

    records, text = as_records(found), StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _as_json(found: Comparison) -> str:
    import json

    from srl.evaluate.comparison import as_records

    about = [
        {"run": run.run, "model": run.model, "setting": run.setting, "left_out": more}
        for run, more in zip(found.runs, found.left_out, strict=True)
    ]
    content = {"questions": found.questions, "runs": about, "tests": found.tests, "rows": as_records(found)}
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


_WRITERS: dict[Format, Callable[[Comparison], str]] = {
    Format.table: _as_table,
    Format.markdown: _as_markdown,
    Format.latex: _as_latex,
    Format.csv: _as_csv,
    Format.json: _as_json,
}
