"""`srl inspect searches` and `grep`: how searches went, and where a text occurs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.inspect.filters import Filters, filtered
from srl.cli.inspect.shared import Json, Run, RunOption, Wide, app, of_run, paths, print_rows, read
from srl.cli.options import exclude


class SearchesBy(StrEnum):
    """What `searches` counts by."""

    step = "step"
    phase = "phase"
    retriever = "retriever"
    source = "source"
    run = "run"


class Place(StrEnum):
    """Where `grep` looks."""

    policy = "policy"
    observation = "observation"
    query = "query"
    question = "question"
    answer = "answer"
    prompt = "prompt"
    feedback = "feedback"


Limit = Annotated[int, typer.Option("--limit", "-n", min=0, help="Maximum number of rows; 0 for all.")]


@app.command()
@filtered("steps", "phase", "source")
def searches(
    run: Run = "last",
    by: Annotated[SearchesBy, typer.Option(help="Count by.")] = SearchesBy.step,
    *,
    filters: Filters,
    failed: Annotated[bool, typer.Option("--failed", help="List the searches that failed, and why.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=0, help="Maximum number of rows of --failed; 0 for all.")
    ] = 20,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Show how searches went: failures, repeated queries, evidence shown or not, latency.

    `repeat`: the episode had asked the same before. `first`: of the answered searches, the share whose first
    passage has a golden answer; `shown`: that showed the policy one that has; `cut`: that found one only
    among what did not fit. Latency is in seconds, with retries.

    \b
    Example:
      srl inspect searches last --by step --phase train
    """
    from srl.browse.searching import failures
    from srl.browse.searching import searches as counted

    chosen = filters.condition()
    exclude({"--failed": failed, "--by": by is not SearchesBy.step}, "failed searches are listed one by one")
    if failed:
        most = limit or 2**31 - 1
        found = read(paths([run]), lambda log: failures(log, chosen, most))
        names = ("id", "step", "phase", "status", "attempts", "query", "error")
        columns = of_run(run) | {name: name for name in names}
    else:
        found = read(paths([run]), lambda log: counted(log, chosen, by.value))
        columns = {name: name for name in _KEYS if found and name in found[0]} | _SEARCH_COLUMNS
    if found:
        print_rows(found, json, columns, wide=wide, least=_LEAST)
    else:
        output.note("no search failed" if failed else "no searches; try fewer filters")


_KEYS = ("run_id", "phase", "step", "retriever", "data_source")
_SEARCH_COLUMNS = {
    "searches": "searches", "episodes": "episodes", "empty": "empty", "rejected": "rejected",
    "failed": "failed", "retried": "retried", "repeated": "repeat", "evidence_first": "first",
    "evidence_shown": "shown", "evidence_cut": "cut", "p50_s": "p50 s", "p95_s": "p95 s", "p99_s": "p99 s",
    "max_s": "max s",
}  # fmt: skip
_LEAST = ("p99 s", "retried", "rejected", "episodes")
"""Columns that a narrow terminal leaves out, in this order."""


@app.command()
@filtered("steps", "phase", "source")
def grep(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Text to look for.", show_default=False)],
    run: RunOption = "last",
    places: Annotated[
        list[Place] | None,
        typer.Option("--in", help="Where (repeatable).", show_default="policy, observation, query"),
    ] = None,
    regex: Annotated[bool, typer.Option("--regex", "-E", help="TEXT is a regular expression (RE2).")] = False,
    case: Annotated[bool, typer.Option("--case", help="Upper and lower case differ.")] = False,
    *,
    filters: Filters,
    limit: Limit = 20,
    json: Json = False,
    wide: Wide = False,
) -> None:
    """Find text in what the policy wrote, in what it read, and in queries, the latest step first.

    --run all looks in every run. One row is one segment or query, with the first match in it.

    \b
    Example:
      srl inspect grep "i don't know" --in policy --phase val
    """
    from srl.browse.grep import FEW, MEMORY, USUAL
    from srl.browse.grep import grep as matches

    chosen = filters.condition()
    where = [place.value for place in places] if places else USUAL
    found = read(
        paths([run]),
        lambda log: matches(log, text, chosen, places=where, regex=regex, case=case, limit=limit or None),
        memory=MEMORY if 0 < limit <= FEW else None,
    )
    if not found:
        output.note("no match")
        return
    print_rows(found, json, of_run(run) | _GREP_COLUMNS, wide=wide)
    if len(found) == limit and not json:
        output.note(f"first {limit} rows; --limit 0 lists all; `srl inspect show ID` shows one")


_GREP_COLUMNS = {
    "id": "id", "step": "step", "phase": "phase", "em": "em", "place": "place", "turn": "turn",
    "excerpt": "excerpt",
}  # fmt: skip
