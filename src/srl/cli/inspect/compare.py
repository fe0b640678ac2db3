"""`srl inspect diff`, `group` and `replay`: one thing beside another."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.inspect.shared import Json, OfPhase, RunOption, Wide, app, paths, print_rows, read, read_holding
from srl.cli.options import RetrieverSettings

if TYPE_CHECKING:
    from srl.browse.diff import Diff, SetDiff, Side
    from srl.evaluate.intervals import Interval

Trajectory = Annotated[str, typer.Argument(metavar="ID", help="Trajectory id, or the beginning of it.")]


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Run, or RUN@STEP.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Run, or RUN@STEP.", show_default=False)],
    phase: OfPhase = None,
    queries: Annotated[
        bool, typer.Option("--queries", help="Also list questions of which only the queries changed.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Maximum number of questions; 0 for all.")
    ] = 20,
    json: Json = False,
    wide: Wide = False,
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

    asked = [browse.read_side(text) for text in (a, b)]
    found = _compared([*asked], phase.value if phase else None)
    changes = [row for row in found.changes if queries or row["change"] != "same"]
    shown = changes[: limit or None]
    if json:
        output.print_rows([_summary(found), *shown])
        return
    for line in _head(found):
        output.line(line)
    if len(found.sets) > 1:
        output.line()
        print_rows([_set_row(one) for one in found.sets], False, _SET_COLUMNS, wide=wide)
    if shown:
        output.line()
        print_rows([_flat(row) for row in shown], False, _DIFF_COLUMNS, wide=wide, least=("source",))
    if len(changes) > len(shown):
        output.note(f"first {len(shown)} of {len(changes)}; --limit 0 lists all")


def _compared(asked: list[tuple[str, int | None]], phase: str | None) -> Diff:
    from srl.browse import diff as browse
    from srl.errors import UserError
    from srl.store.reader import copies_of_runs, find_logs

    found = paths([run for run, _ in asked])
    if copies_of_runs([log for path in found for log in find_logs(path)]):
        raise UserError(f"{found[0]} and {found[1]} are copies of the same run")

    def compared(log: Any) -> Diff:
        names = [browse.run_of(log, path) for path in found]
        sides = [(name, step) for name, (_, step) in zip(names, asked, strict=True)]
        return browse.diff(log, *browse.sides(log, sides, phase))

    return read(list(dict.fromkeys(found)), compared)


def _head(found: Diff) -> list[str]:
    test, n = found.test, found.questions
    names = ("wrong→right", "right→wrong") if found.single else ("better", "worse")
    counts = ", ".join(
        f"{name} {count} ({_share(count / n, interval)})"
        for name, (count, interval) in zip(names, (found.better, found.worse), strict=True)
    )
    return [
        f"A  {_side(found.a)}  EM {found.em_a:.3f}",
        f"B  {_side(found.b)}  EM {found.em_b:.3f}",
        f"{n} questions in both; {found.only_a} only in A, {found.only_b} only in B",
        f"B - A  {test.difference:+.3f}, 95% interval {_interval(test.interval)}, p {test.p:.3g}",
        f"{counts}; other queries {found.other_queries} ({found.other_queries / n:.1%})",
    ]


def _side(side: Side) -> str:
    return f"{side.run_id} {side.phase} step {side.step}"


def _interval(found: Interval | None) -> str:
    return "none: too few documents" if found is None else f"{found.low:+.3f} to {found.high:+.3f}"


def _set_row(found: SetDiff) -> dict[str, Any]:
    return {
        "data_sources": " + ".join(found.data_sources), "questions": found.questions, "em_a": found.em_a,
        "em_b": found.em_b, "difference": f"{found.test.difference:+.3f}",
        "interval": _interval(found.test.interval),
    }  # fmt: skip


_SET_COLUMNS = {
    "data_sources": "source", "questions": "questions", "em_a": "EM of A", "em_b": "EM of B",
    "difference": "B - A", "interval": "95% interval",
}  # fmt: skip


def _share(share: float, found: Interval | None) -> str:
    return f"{share:.1%}" + ("" if found is None else f", {found.low:.1%} to {found.high:.1%}")


def _summary(found: Diff) -> dict[str, Any]:
    """The first line of JSON: both sides, the difference, and the counts."""
    sides = {
        name: {"run_id": side.run_id, "phase": side.phase, "step": side.step, "em": em}
        for name, side, em in (("a", found.a, found.em_a), ("b", found.b, found.em_b))
    }
    return sides | {
        "questions": found.questions, "only_a": found.only_a, "only_b": found.only_b,
        "difference": found.test.difference, "interval": found.test.interval, "p": found.test.p,
        "better": found.better[0], "better_interval": found.better[1],
        "worse": found.worse[0], "worse_interval": found.worse[1], "other_queries": found.other_queries,
        "sets": [
            {
                "data_sources": one.data_sources, "questions": one.questions, "em_a": one.em_a,
                "em_b": one.em_b, "difference": one.test.difference, "interval": one.test.interval,
            }
            for one in found.sets
        ],
    }  # fmt: skip


_DIFF_COLUMNS = {
    "change": "change", "data_source": "source", "id_a": "id in A", "id_b": "id in B", "em": "em",
    "answer": "answer", "queries": "queries", "question": "question",
}  # fmt: skip


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A row for the table: what A and B have of the first sample, with an arrow between."""

    def arrow(one: str, other: str) -> str:
        return one if one == other else f"{one} → {other}"

    answers = ["(none)" if row[f"answer_{side}"] is None else row[f"answer_{side}"] for side in "ab"]
    asked = [" | ".join(row[f"queries_{side}"]) or "(none)" for side in "ab"]
    return row | {
        "em": arrow(f"{row['em_a']:.3g}", f"{row['em_b']:.3g}"),
        "answer": arrow(*answers),
        "queries": arrow(*asked),
    }


@app.command()
def group(trajectory: Trajectory, run: RunOption = "last", json: Json = False, wide: Wide = False) -> None:
    """Show the samples of one question in one step: scores, advantages, queries, answers.

    `srl inspect show ID` shows each in full.

    \b
    Example:
      srl inspect group 0bdf61
    """
    from srl.browse.groups import group as members
    from srl.browse.groups import in_words, summary

    samples = read_holding(run, lambda log, path: members(log, trajectory))
    found = [summary(one) for one in samples]
    if json:
        output.print_rows(found)
        return
    first = found[0]
    output.line(f"question  {first['question']}  ({first['question_id']})")
    output.line(f"gold      {' | '.join(first['golden_answers'])}")
    output.line(f"group     {first['run_id']}, {first['phase']} step {first['step']}: {in_words(found)}")
    output.line()
    rows = [row | {"queries": " | ".join(row["queries"])} for row in found]
    print_rows(rows, False, _GROUP_COLUMNS, wide=wide, least=("tokens", "end"))


_GROUP_COLUMNS = {
    "id": "id", "sample": "sample", "em": "em", "reward": "reward", "advantage": "advantage",
    "verdict": "verdict", "end": "end", "tokens": "tokens", "answer": "answer", "queries": "queries",
}  # fmt: skip


@app.command()
def replay(
    trajectory: Trajectory,
    index: Annotated[Path, typer.Option(metavar="DIR", help="Index to search.", show_default=False)],
    run: RunOption = "last",
    topk: Annotated[
        int | None,
        typer.Option("-k", "--topk", min=1, help="Hits per query; default: as many as were found."),
    ] = None,
    settings: RetrieverSettings = None,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Search another index for the queries of a trajectory, and show both results side by side.

    `*` marks passages that contain a golden answer. Nothing is generated: it is what the same queries would
    have brought.

    \b
    Example:
      srl inspect replay 0bdf61 --index my-index -k 5
    """
    from srl.browse.replay import as_rows
    from srl.browse.replay import replay as again
    from srl.browse.transcript import transcript
    from srl.cli.index.shared import open_with

    shown = read_holding(run, lambda log, path: transcript(log, trajectory))
    golds = shown.record.trajectory.question.golden_answers
    found = again(shown.record.trajectory, open_with(index, settings), topk)
    rows = as_rows(found, golds)
    if json:
        output.print_rows(rows)
        return
    output.line(f"question  {shown.row['question']}")
    output.line(f"gold      {' | '.join(golds)}")
    for number, one in enumerate(found, start=1):
        output.line()
        output.line(f"search {number}: {one.search.query}")
        counts = f"with a golden answer {one.gold}, now {one.gold_now}; in both {one.common}"
        hits = f"{len(one.search.hits)} passages, now {one.hits_now}"
        output.line(f"  {one.search.status}, {hits}; {counts}")
        mine = [_marked(row) for row in rows if row["search"] == number]
        print_rows(mine, False, {"rank": "rank", "was": "logged", "now": str(index)}, wide=wide)


def _marked(row: dict[str, Any]) -> dict[str, Any]:
    def cell(prefix: str) -> str:
        if row[f"{prefix}id"] is None:
            return ""
        mark = "*" if row[f"{prefix}gold"] else " "
        hidden = " (not shown)" if prefix and row["was_shown"] == "none" else ""
        return f"{mark} {row[f'{prefix}title']}  [{row[f'{prefix}id']}]{hidden}"

    return {"rank": row["rank"], "was": cell("was_"), "now": cell("")}
