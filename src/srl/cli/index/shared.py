"""Arguments and output that the commands of `srl index` share."""

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

IndexDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Index directory.")]
Questions = Annotated[
    Path,
    typer.Option(help="Parquet, JSON lines, SQuAD, TREC topics, or `ID <tab> QUESTION` lines."),
]
Qrels = Annotated[
    Path | None,
    typer.Option(help="Relevance judgements in TREC format: `question 0 passage grade` per line."),
]
Answers = Annotated[
    bool,
    typer.Option(
        "--answers", help="Count passages that contain an answer as relevant, and ignore judgements."
    ),
]


LABELS = {"judgements": "the passages judged relevant", "answers": "the passages that contain an answer"}
"""What counts as relevant, in words."""


def open_with(directory: Path, settings: list[str] | None) -> Index:
    """The index at `directory`, with the options of `--set`."""
    from srl.cli.options import read_settings
    from srl.index import open_index, read_index_manifest

    return open_index(directory, read_settings(read_index_manifest(directory).retriever, settings or []))


def stages(what: str = "passages") -> AbstractContextManager[Callable[[str, int, int | None], None]]:
    """A progress bar for each stage of the work, one after the other."""
    show_with(output.progress)
    return counted_stages(what)


def show_index(directory: Path, manifest: Manifest, as_json: bool) -> None:
    """Print the facts about an index, and whether its files were verified since they last changed."""
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
        facts["verified"] = f"no, only sizes and file ends; type: srl index info {directory} --verify"
    else:
        facts["verified"] = "yes, every byte"
    if not manifest.corpus_digest:
        facts |= {"passages": "none: it searches an external service", "corpus": "none"}
        del facts["corpus_digest"], facts["bytes"], facts["verified"]
    if not manifest.identity:
        del facts["identity"]
    for name, value in facts.items():
        output.line(f"{name.replace('_', ' '):<18}{value}")


def _pairs(values: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items()) or "none"


def figure_cells(figure: Estimate) -> tuple[str, str]:
    """A mean and its interval as table cells."""
    from math import isnan

    if isnan(figure.low):
        return f"{figure.mean:.4f}", "-"
    return f"{figure.mean:.4f}", f"{figure.low:.4f} to {figure.high:.4f}"


def read_depths(text: str) -> tuple[int, ...]:
    """The depths in `1,3,5`, sorted. Raises UserError for numbers outside 1 to 10,000."""
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        depths = []
    if not depths or depths[0] < 1 or depths[-1] > 10_000:
        raise UserError(
            f"--k {text}: expected numbers from 1 to 10,000 separated by commas, as in --k 1,3,10"
        )
    return tuple(depths)


def notes(lines: Sequence[str]) -> None:
    """Print each note as a line on stderr."""
    for line in lines:
        output.note(f"note: {line}")
