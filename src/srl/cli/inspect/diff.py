"""`srl inspect diff`: two runs, or two steps, side by side."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, Limit, OfPhase, app, paths, print_rows, read

if TYPE_CHECKING:
    import duckdb

    from srl.browse.diff import Diff


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Run, or RUN@STEP.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Run, or RUN@STEP.", show_default=False)],
    phase: OfPhase = None,
    queries: Annotated[
        bool, typer.Option("--queries", help="Also list questions of which only the queries changed.")
    ] = False,
    limit: Limit = 20,
    json: Json = False,
) -> None:
    """Compare two runs, or two steps, on the questions of both: which flipped, which queries changed.

    Without a step, the last one. Without --phase, the first of eval, val, test and train that both have. Of
    several samples of a question the mean EM counts. Intervals and p-value are those of `srl eval compare`.
    Of several data sets each has its own line, since questions from too few documents have no interval.

    \b
    Example:
      srl inspect diff last@10 last@20 --phase val
    """
    from srl.browse import diff as browse

    pairs = [browse.read_side(text) for text in (a, b)]
    runs = paths([run for run, _ in pairs])

    def compare(log: duckdb.DuckDBPyConnection) -> Diff:
        names = [browse.run_of(log, path) for path in runs]
        sides = [(name, step) for name, (_, step) in zip(names, pairs, strict=True)]
        return browse.diff(log, *browse.sides(log, sides, phase))

    result = read(list(dict.fromkeys(runs)), compare)
    changes = [row for row in result.changes if queries or row["change"] != "same"]
    table = changes[: limit or None]
    if json:
        about = {part.name: getattr(result, part.name) for part in fields(result) if part.name != "changes"}
        output.print_rows([about, *table])
        return
    _print_summary(result)
    if table:
        output.line()
        print_rows([_flat(row) for row in table], False, _CHANGES, least=("source", "gold"))
    if len(changes) > len(table):
        output.note(f"first {len(table)} of {len(changes)}; --limit 0 lists all")


_CHANGES = {
    "change": "change", "data_source": "source", "id_a": "id in A", "id_b": "id in B", "em": "em",
    "answer": "answer", "golden_answers": "gold", "queries": "queries", "question": "question",
}  # fmt: skip


def _print_summary(result: Diff) -> None:
    from srl.browse.formatting import counted
    from srl.evaluate.intervals import in_words

    n = result.questions
    for letter, side in (("A", result.a), ("B", result.b)):
        output.line(f"{letter}  {side.run_id} {side.phase} step {side.step}")
    output.line(f"{counted(n, 'question')} in both; {result.only_a} only in A, {result.only_b} only in B")
    for name, (count, interval) in (("better in B", result.better), ("worse in B", result.worse)):
        bounds = "" if interval is None else f", {interval.low:.1%} to {interval.high:.1%}"
        output.line(f"{name}: {count} ({count / n:.1%}{bounds})")
    output.line(f"other queries: {result.other_queries} ({result.other_queries / n:.1%})\n")
    rows = [
        (a.source, a.questions, f"{a.value:.3f}", f"{b.value:.3f}", f"{b.difference:+.3f}",
         in_words(b.difference_interval, sign="+"), f"{b.p:.3g}")
        for a, b in result.rows
    ]  # fmt: skip
    output.table(("source", "questions", "EM of A", "EM of B", "B - A", "95% interval", "p"), rows)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table: what A and B have of the first sample, with an arrow between."""
    texts = {
        "em": [f"{row[f'em_{side}']:.3g}" for side in "ab"],
        "answer": ["(none)" if row[f"answer_{side}"] is None else row[f"answer_{side}"] for side in "ab"],
        "queries": [" | ".join(row[f"queries_{side}"]) or "(none)" for side in "ab"],
    }
    return row | {name: " → ".join(dict.fromkeys(pair)) for name, pair in texts.items()}
