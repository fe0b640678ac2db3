"""Options and output that the commands of `srl index` share."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output
from srl.progress import counted_stages, show_with

if TYPE_CHECKING:
    from collections.abc import Callable

    from srl.index import Index, Manifest

IndexDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="Index directory.")]


def open_with(directory: Path, settings: list[str] | None) -> Index:
    """The index at `directory`, with the options of `--set`."""
    from srl.cli.options import read_settings
    from srl.index import open_index, read_index_manifest

    return open_index(directory, read_settings(read_index_manifest(directory).retriever, settings or []))


def stages() -> AbstractContextManager[Callable[[str, int, int | None], None]]:
    """A progress bar for each stage of the work, one after the other."""
    show_with(output.progress)
    return counted_stages("passages")


def show_index(directory: Path, manifest: Manifest, as_json: bool) -> None:
    """Print the facts about an index."""
    facts = {"directory": directory, **manifest.model_dump(exclude={"format", "kind", "files", "checksums"})}
    facts["bytes"] = manifest.size
    if as_json:
        output.print_json(facts)
        return
    for name in ("options", "identity"):
        facts[name] = " ".join(f"{key}={value}" for key, value in facts[name].items()) or "none"
    for name in ("passages", "bytes"):
        facts[name] = f"{facts[name]:,}"
    if not manifest.corpus_digest:
        facts |= {"passages": "none: it searches an external service", "corpus": "none", "corpus_digest": ""}
    for name, value in facts.items():
        if value:
            output.line(f"{name.replace('_', ' '):<18}{value}")
