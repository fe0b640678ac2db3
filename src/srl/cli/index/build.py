"""`srl index build`, `import` and `info`: an index from a corpus or from another program's files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli.index.shared import AsJson, IndexDirectory, Settings, show_index, stages
from srl.cli.output import progress
from srl.cli.settings import read_settings

if TYPE_CHECKING:
    from srl.index import Manifest

Out = Annotated[Path, typer.Option(help="The directory to build; it appears whole or not at all.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an index that is there.")]


def build(
    out: Out,
    corpus: Annotated[
        Path | None,
        typer.Option(help="The corpus: JSON lines of passages or TREC documents, .gz too; none for web."),
    ] = None,
    retriever: Annotated[str, typer.Option(help="What will search it; also module:Class.")] = "bm25",
    settings: Settings = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Build the index of a corpus.

    \b
    Example:
      srl index build --corpus corpus.jsonl --out my-index --set k1=0.9
    """
    from srl.index import build_index
    from srl.plugins.import_path import look_in

    look_in(Path.cwd())
    options = read_settings(retriever, settings or [])
    with stages() as report:
        manifest = build_index(corpus, out, retriever, options, report, overwrite=force)
    show_index(out, manifest, as_json)


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="An index file or directory.")],
    retriever: Annotated[str, typer.Option(help="The retriever that reads it: lucene or e5.")],
    out: Out,
    corpus: Annotated[
        Path | None, typer.Option(help="The corpus that it was built from, if it has no passages itself.")
    ] = None,
    settings: Settings = None,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make an index of what another program built: its files are linked, or copied where they cannot be.

    \b
    Example:
      srl index import bm25 --retriever lucene --corpus wiki-18.jsonl.gz --out wiki18
    """
    from srl.index import import_index
    from srl.plugins.import_path import look_in

    look_in(Path.cwd())
    options = read_settings(retriever, settings or [])
    with stages() as report:
        manifest = import_index(source, out, retriever, options, corpus, report, overwrite=force)
    show_index(out, manifest, as_json)


def info(
    directory: IndexDirectory,
    corpus: Annotated[
        Path | None, typer.Option(help="Also check that the index was built from this corpus.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--verify", help="Read all files whole and compare their checksums.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what an index is, and check its files: sizes and ends, or, with --verify, every byte.

    \b
    Example:
      srl index info my-index --verify
    """
    from srl.index import check_corpus, check_index

    manifest = check_index(directory)
    if whole:
        _verify(directory, manifest)
    if corpus is not None:
        check_corpus(directory, corpus)
    show_index(directory, manifest, as_json)


def _verify(directory: Path, manifest: Manifest) -> None:
    """Read the index whole, with a bar."""
    from threading import Lock

    from srl.index import verify

    done, lock = 0, Lock()
    with progress("bytes read", manifest.size) as update:

        def report(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                update(done)

        verify(directory, manifest, report)
