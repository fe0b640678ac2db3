"""`srl inspect diff`: two runs, or two steps, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, Limit, OfPhase, app, paths, print_rows, read
from srl.errors import UserError

if TYPE_CHECKING:
    import duckdb

    from srl.browse.diff import Diff, SetDiff


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
    from srl.store.reader import copies_of_runs, find_logs

    chosen = [browse.read_side(text) for text in (a, b)]
    runs = paths([run for run, _ in chosen])
    if copies_of_runs([log for path in runs for log in find_logs(path)]):
        raise UserError(f"{runs[0]} and {runs[1]} are copies of the same run")

    def compare(log: duckdb.DuckDBPyConnection) -> Diff:
        names = [browse.run_of(log, path) for path in runs]
        sides = [(name, step) for name, (_, step) in zip(names, chosen, strict=True)]
        return browse.diff(log, *browse.sides(log, sides, phase and phase.value))

    result = read(list(dict.fromkeys(runs)), compare)
    changes = [row for row in result.changes if queries or row["change"] != "same"]
    shown = changes[: limit or None]
    if json:
        output.print_rows([_summary(result), *shown])
        return
    _print_summary(result)
    if shown:
        output.line()
        print_rows([_flat(row) for row in shown], False, _CHANGES, least=("source", "gold"))
    if len(changes) > len(shown):
        output.note(f"first {len(shown)} of {len(changes)}; --limit 0 lists all")


_SETS = {
    "data_source": "source", "questions": "questions", "em_a": "EM of A", "em_b": "EM of B",
    "difference": "B - A", "interval": "95% interval", "p": "p",
}  # fmt: skip
_CHANGES = {
    "change": "change", "data_source": "source", "id_a": "id in A", "id_b": "id in B", "em": "em",
    "answer": "answer", "golden_answers": "gold", "queries": "queries", "question": "question",
}  # fmt: skip


def _print_summary(result: Diff) -> None:
    n = result.whole.questions
    for letter, side in (("A", result.a), ("B", result.b)):
        output.line(f"{letter}  {side.run_id} {side.phase} step {side.step}")
    output.line(f"{n} questions in both; {result.only_a} only in A, {result.only_b} only in B")
    for name, (count, interval) in (("better in B", result.better), ("worse in B", result.worse)):
        bounds = "" if interval is None else f", {interval.low:.1%} to {interval.high:.1%}"
        output.line(f"{name}: {count} ({count / n:.1%}{bounds})")
    output.line(f"other queries: {result.other_queries} ({result.other_queries / n:.1%})")
    output.line()
    several = result.sets if len(result.sets) > 1 else []
    print_rows([_set_row(one) for one in (*several, result.whole)], False, _SETS)


def _set_row(one: SetDiff) -> dict[str, Any]:
    from srl.evaluate.intervals import in_words

    return {
        "data_source": one.data_source, "questions": one.questions, "em_a": one.em_a, "em_b": one.em_b,
        "difference": f"{one.test.difference:+.3f}", "interval": in_words(one.test.interval, sign="+"),
        "p": f"{one.test.p:.3g}",
    }  # fmt: skip


def _summary(result: Diff) -> dict[str, Any]:
    """The first line of JSON: both sides, the difference, and the counts."""
    sides = {
        name: {"run_id": side.run_id, "phase": side.phase, "step": side.step, "em": em}
        for name, side, em in (("a", result.a, result.whole.em_a), ("b", result.b, result.whole.em_b))
    }
    return sides | _numbers(result.whole) | {
        "only_a": result.only_a, "only_b": result.only_b,
        "better": result.better[0], "better_interval": result.better[1],
        "worse": result.worse[0], "worse_interval": result.worse[1],
        "other_queries": result.other_queries,
        "sets": [
            {"data_source": one.data_source, "em_a": one.em_a, "em_b": one.em_b} | _numbers(one)
            for one in result.sets
        ],
    }  # fmt: skip


def _numbers(one: SetDiff) -> dict[str, Any]:
    test = one.test
    return {"questions": one.questions, "difference": test.difference, "interval": test.interval, "p": test.p}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table: what A and B have of the first sample, with an arrow between."""
    texts = {
        "em": [f"{row[f'em_{side}']:.3g}" for side in "ab"],
        "answer": ["(none)" if row[f"answer_{side}"] is None else row[f"answer_{side}"] for side in "ab"],
        "queries": [" | ".join(row[f"queries_{side}"]) or "(none)" for side in "ab"],
    }
    return row | {name: " → ".join(dict.fromkeys(pair)) for name, pair in texts.items()}
