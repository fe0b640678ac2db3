"""`srl inspect why`: a written report on why a run got worse."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, Run, app, paths, read
from srl.cli.options import Overwrite, check_new, exclude


class Form(StrEnum):
    """The formats of the report."""

    text = "text"
    markdown = "markdown"
    html = "html"


@app.command()
def why(
    run: Run = "last",
    form: Annotated[
        Form | None, typer.Option("--format", help="Format; default: by the file's name, else text.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write FILE (.md, .html, .txt).")] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Report why a training run got worse: its curves, the likeliest cause with its evidence, examples.

    It first asks whether exact match fell, in training or in validation. If it fell, rules compare the steps
    before with those since: docs/inspect.md lists them. A run that rose has no cause, unless searches fail or
    numbers are not finite.

    \b
    Example:
      srl inspect why last -o why.html
    """
    from srl.browse.diff import run_of
    from srl.browse.why import diagnose
    from srl.browse.why_report import report
    from srl.files import atomic_file

    exclude({"--json": json, "--out": out is not None}, "JSON goes to stdout; redirect it")
    check_new(out, overwrite)
    exclude({"--json": json, "--format": form is not None}, "both say what the report looks like")
    directory = paths([run], trained=run == "last")
    found = read(directory, lambda log: diagnose(log, run_of(log, directory[0])))
    if json:
        output.print_rows([_as_json(found)])
        return
    by_name = {".md": Form.markdown, ".html": Form.html, ".htm": Form.html}
    chosen = form or (by_name.get(out.suffix, Form.text) if out else Form.text)
    made = report(found, chosen.value)
    if out is None:
        output.verbatim(made)
        return
    with atomic_file(out, "w") as file:
        file.write(made)
    output.line(out)


def _as_json(found: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)
