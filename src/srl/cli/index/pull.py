"""`srl index pull`: Search-R1's published files from the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from srl.cli import output
from srl.cli.options import Json


def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="wiki18-bm25, wiki18-e5 or wiki18-corpus.")],
    out: Annotated[
        Path | None, typer.Option(help="Output directory; default: one of that name in the workspace.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option(help="Commit, branch or tag of the data set; default: the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Download files published by Search-R1: the BM25 index, the E5 index or the passages of wiki-18.

    Prints the disk space and memory needed first. After an interruption the same command downloads the
    files that are not whole.

    \b
    Example:
      srl index pull wiki18-bm25 --out wiki18-bm25
    """
    from srl.index.pull import in_gb, plan_pull, run_pull
    from srl.workspace import Workspace

    place, endpoint = out or Workspace.resolve().indexes / "published" / name, os.environ.get("HF_ENDPOINT")
    plan = plan_pull(name, place, revision, endpoint)
    output.note(
        f"{plan.dataset.repository} at {plan.commit[:12]}: {in_gb(plan.size)} to {place}, "
        f"{in_gb(plan.missing)} left to download"
    )
    output.note(f"{name}: {plan.in_words(plan.dataset.memory)}")
    run_pull(plan, endpoint)
    then = plan.in_words(plan.dataset.then)
    if as_json:
        facts = {"name": name, "directory": place, "revision": plan.commit, "files": plan.files, "then": then}
        output.print_json(facts)
        return
    for top in sorted({Path(file).parts[0] for file in plan.files}):
        output.line(place / top)
    output.note(f"now type: {then}")
