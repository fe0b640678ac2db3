"""`srl index search`: search an index."""

from __future__ import annotations

import os
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.index.shared import IndexDirectory, open_with
from srl.cli.layout import snippet
from srl.cli.options import Json, RetrieverSettings
from srl.errors import UserError
from srl.safe_text import one_line

if TYPE_CHECKING:
    from srl.trajectory import Hit


def search(
    directory: IndexDirectory,
    queries: Annotated[
        list[str], typer.Argument(metavar="QUERY…", help="Queries; - reads one per line from stdin.")
    ],
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="Hits per query.")] = 3,
    settings: RetrieverSettings = None,
    full: Annotated[bool, typer.Option("--full", help="Print whole passages on a terminal too.")] = False,
    as_json: Json = False,
) -> None:
    """Search an index.

    On a terminal a hit takes at most three lines; in a pipe it is one line with the whole passage.

    \b
    Example:
      srl index search my-index "who wrote the origin of species" -k 3
    """
    wanted = _lines() if queries == ["-"] else queries
    if any(not query.strip() for query in wanted):
        raise UserError('empty query; type: srl index search DIR "who wrote …"')
    for query in wanted:
        output.checked_text(query, "query")
    if not os.path.isdir(directory) and os.path.isdir(queries[-1]):
        raise UserError(
            f"DIR comes before QUERY; type: srl index search {shlex.join([queries[-1], str(directory)])}"
        )
    found = _hits(open_with(directory, settings).outcomes(wanted, topk), wanted)
    if as_json:
        output.print_json([_as_json(*pair) for pair in zip(wanted, found, strict=True)])
        return
    for query, hits in zip(wanted, found, strict=True):
        _print_hits(query if len(wanted) > 1 else "", hits, full)


def _hits(outcomes: list[Any], queries: list[str]) -> list[list[Hit]]:
    """The hits of every query. Raises UserError for the first query that failed."""
    for query, outcome in zip(queries, outcomes, strict=True):
        if isinstance(outcome, Exception):
            raise UserError(f"no answer to {query!r}: {outcome}") from outcome
    return outcomes


def _lines() -> list[str]:
    if sys.stdin is None:
        raise UserError("standard input is closed; give the query as an argument")
    lines = [line for line in output.stdin_lines() if line.strip()]
    if not lines:
        raise UserError("no query on standard input; expected one per line")
    return lines


def _as_json(query: str, hits: list[Hit]) -> dict[str, Any]:
    rows = [{"id": hit.passage.id, "contents": hit.passage.contents, "score": hit.score} for hit in hits]
    return {"query": query, "hits": rows}


def _print_hits(query: str, hits: list[Hit], full: bool) -> None:
    if query:
        output.line(f"? {query}")
    if not hits:
        output.line("no hits")
    for rank, hit in enumerate(hits, start=1):
        passage, width = hit.passage, sys.maxsize if full else output.terminal_width()
        what = one_line(passage.id), one_line(f"{passage.title}: {passage.text}")
        text = "  ".join((str(rank), f"{hit.score:.3f}", *what))
        output.line(text if width == sys.maxsize else snippet(text, width))
