"""What the commands of `srl index` share: arguments, settings, progress, an index in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.errors import UserError
from srl.progress import counted_stages, show_with

if TYPE_CHECKING:
    from srl.evaluate.intervals import Estimate
    from srl.index import Index, Manifest

IndexDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the index.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the retriever; may come again."),
]
Questions = Annotated[
    Path,
    typer.Option(help="Parquet, JSON lines, SQuAD, TREC topics, or `ID <tab> QUESTION` lines."),
]
Qrels = Annotated[
    Path | None, typer.Option(help="Judgements, `question 0 passage grade` on each line, as TREC has them.")
]
Answers = Annotated[
    bool, typer.Option("--answers", help="Look for the answers in the passages, whatever is judged.")
]


LABELS = {"judgements": "the passages judged relevant", "answers": "the passages that contain an answer"}
"""By what an index is measured, in words."""


def open_with(directory: Path, settings: list[str] | None) -> Index:
    """The index at `directory`, with options of this machine as `--set` gives them."""
    from srl.cli.settings import read_settings
    from srl.index import open_index, read_index_manifest

    return open_index(directory, read_settings(read_index_manifest(directory).retriever, settings or []))


def stages(what: str = "passages") -> AbstractContextManager[Callable[[str, int, int | None], None]]:
    """One bar for each stage of a work, one after the other."""
    show_with(output.progress)
    return counted_stages(what)


def show_index(directory: Path, manifest: Manifest, as_json: bool) -> None:
    """What an index says about itself, and whether its files were read whole since they last changed."""
    from srl.index import is_verified

    facts = {
        "directory": directory,
        "retriever": manifest.retriever,
        "options": dict(manifest.options),
        "passages": manifest.passages,
        "digest": manifest.digest,
        "corpus": manifest.corpus,
        "corpus_digest": manifest.corpus_digest,
        "created": manifest.created,
        "srl_version": manifest.srl_version,
        "retriever_version": manifest.retriever_version,
        "identity": dict(manifest.identity),
        "bytes": manifest.size,
        "verified": is_verified(directory, manifest),
    }
    if as_json:
        output.print_json(facts)
        return
    facts |= {name: _pairs(facts[name]) for name in ("options", "identity")}
    facts |= {name: f"{facts[name]:,}" for name in ("passages", "bytes")}
    if not facts["verified"]:
        facts["verified"] = f"no, sizes and ends only; type: srl index info {directory} --verify"
    else:
        facts["verified"] = "yes, every byte"
    if not manifest.corpus_digest:
        facts |= {"passages": "none: it searches outside", "corpus": "none"}
        del facts["corpus_digest"], facts["bytes"], facts["verified"]
    if not manifest.identity:
        del facts["identity"]
    for name, value in facts.items():
        output.line(f"{name.replace('_', ' '):<18}{value}")


def _pairs(values: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "none"


def figure_cells(figure: Estimate) -> tuple[str, str]:
    """A mean and its interval, as a table shows them."""
    from math import isnan

    if isnan(figure.low):
        return f"{figure.mean:.4f}", "-"
    return f"{figure.mean:.4f}", f"{figure.low:.4f} to {figure.high:.4f}"


def read_depths(text: str) -> tuple[int, ...]:
    """`1,3,5` as numbers, the smallest first. Raises UserError for what is none of 1 to 10,000."""
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        depths = []
    if not depths or depths[0] < 1 or depths[-1] > 10_000:
        raise UserError(
            f"--k {text}: expected numbers from 1 to 10,000 with commas between, as in --k 1,3,10"
        )
    return tuple(depths)


def notes(lines: Sequence[str]) -> None:
    """What a person should hear, each on a line of stderr."""
    for line in lines:
        output.note(f"note: {line}")
