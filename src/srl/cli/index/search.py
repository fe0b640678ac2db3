"""`srl index search`: search an index."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.index.shared import IndexDirectory, open_with
from srl.cli.options import Json, RetrieverSettings
from srl.errors import UserError
from srl.safe import one_line


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

    On a terminal a hit takes about three lines; in a pipe it is one line with the whole passage.

    \b
    Example:
      srl index search my-index "who wrote the origin of species" -k 3
    """
    if queries == ["-"]:
        queries = [line for line in output.stdin_lines() if line.strip()]
    for query in queries:
        output.checked_text(query, "query")
    if not queries or any(not query.strip() for query in queries):
        raise UserError("empty query", hint='type: srl index search DIR "who wrote …"')
    results = []
    for query, outcome in zip(queries, open_with(directory, settings).outcomes(queries, topk), strict=True):
        if isinstance(outcome, Exception):
            raise UserError(f"no answer to {query!r}: {outcome}") from outcome
        results.append((query, outcome))
    if as_json:
        rows = ([hit.passage.row() | {"score": hit.score} for hit in hits] for _, hits in results)
        output.print_json([{"query": q, "hits": hits} for q, hits in zip(queries, rows, strict=True)])
        return
    width = None if full or not sys.stdout.isatty() else 3 * output.terminal_width()
    for query, hits in results:
        if len(queries) > 1:
            output.line(f"? {query}")
        if not hits:
            output.line("no hits")
        for rank, hit in enumerate(hits, start=1):
            passage = one_line(f"{hit.passage.title}: {hit.passage.text}", width)
            output.line("  ".join((str(rank), f"{hit.score:.3f}", one_line(hit.passage.id), passage)))
