"""`srl inspect why`: why a run got worse."""

from __future__ import annotations

from srl.cli import output
from srl.cli.inspect.shared import Json, Run, app, paths, print_rows, read


@app.command()
def why(run: Run = "last", json: Json = False) -> None:
    """Say why a training run got worse: the likeliest cause, what changed, and episodes that show it.

    The steps before exact match fell are compared with those since, along the chain from question to answer;
    docs/inspect.md lists the rules. A run that rose has no cause, unless episodes fail.

    \b
    Example:
      srl inspect why last
    """
    from dataclasses import asdict

    from srl.browse.diff import run_of
    from srl.browse.why import CAUSES, EXAMPLES, HEADINGS
    from srl.browse.why import why as reason

    [directory] = paths([run], trained=run == "last")
    result = read([directory], lambda log: reason(log, run_of(log, directory)))
    if json:
        output.print_rows([asdict(result)])
        return
    output.line(f"{result.run_id}: {result.outcome}.")
    for place, cause in enumerate(result.causes):
        output.line(f"{'also' if place else 'likeliest cause'}: {cause}. {CAUSES[cause][0]}")
    if not result.causes:
        output.line("no rule names a cause")
    output.line()
    print_rows(result.changes, False, HEADINGS)
    if result.examples:
        output.line()
        print_rows(result.examples, False, EXAMPLES, least=("searches", "reward"))
