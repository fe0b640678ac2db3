"""`srl inspect why`: why a run got worse."""

from __future__ import annotations

from srl.cli import output
from srl.cli.inspect.shared import Json, Run, Wide, app, paths, print_rows, read


@app.command()
def why(run: Run = "last", json: Json = False, wide: Wide = False) -> None:
    """Say why a training run got worse: the likeliest cause, what changed, and episodes that show it.

    It asks whether exact match fell, in training or in validation, and compares the steps before with those
    since, along the chain from question to answer. docs/inspect.md lists the rules. A run that rose has no
    cause, unless episodes fail or numbers are not finite.

    \b
    Example:
      srl inspect why last
    """
    from dataclasses import asdict

    from srl.browse.diff import run_of
    from srl.browse.why import CAUSES, EXAMPLES, HEADINGS
    from srl.browse.why import why as reason

    [directory] = paths([run], trained=run == "last")
    found = read([directory], lambda log: reason(log, run_of(log, directory)))
    if json:
        output.print_rows([asdict(found)])
        return
    output.line(f"{found.run_id}: {found.outcome}.")
    for place, cause in enumerate(found.causes):
        output.line(f"{'also' if place else 'likeliest cause'}: {cause}. {CAUSES[cause][0]}")
    if not found.causes:
        output.line("no rule names a cause")
    output.line()
    print_rows(found.changes, False, HEADINGS, wide=wide)
    if found.examples:
        output.line()
        print_rows(found.examples, False, EXAMPLES, wide=wide, least=("searches", "reward"))
        output.note(f"srl inspect show {found.examples[0]['id']} --run {found.run_id}")
