"""`srl index build`, `import` and `info`: an index from a corpus or from another program's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from srl.cli.index.shared import IndexDirectory, show_index, stages
from srl.cli.options import Json, Overwrite, RetrieverSettings, check_new, read_settings
from srl.cli.output import note

Out = Annotated[Path, typer.Option(help="Output directory; written atomically.")]


def build(
    out: Out,
    corpus: Annotated[
        Path | None,
        typer.Option(help="Corpus: JSON lines, Parquet, CSV (.gz, .zst), TREC, a folder; none for web."),
    ] = None,
    retriever: Annotated[str, typer.Option(help="What will search it; also module:Class.")] = "bm25",
    settings: RetrieverSettings = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Build the index of a corpus.

    \b
    Example:
      srl index build --corpus corpus.jsonl --out my-index --set k1=0.9
    """
    from srl.index import build_index
    from srl.plugins.import_path import look_in

    check_new(out, overwrite, inputs=[corpus])
    look_in(Path.cwd())
    options = read_settings(retriever, settings or [])
    with stages() as report:
        manifest = build_index(corpus, out, retriever, options, report, overwrite=overwrite)
    show_index(out, manifest, as_json)


def import_(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Index file or directory.")],
    retriever: Annotated[str, typer.Option(help="Retriever that reads it: lucene or e5.")],
    out: Out,
    corpus: Annotated[
        Path | None, typer.Option(help="Corpus it was built from, if it contains no passages.")
    ] = None,
    settings: RetrieverSettings = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Import an index that another program built; its files are linked, or copied if that is not possible.

    \b
    Example:
      srl index import bm25 --retriever lucene --corpus wiki-18.jsonl.gz --out wiki18
    """
    from srl.index import import_index
    from srl.plugins.import_path import look_in

    check_new(out, overwrite, inputs=[source, corpus])
    look_in(Path.cwd())
    options = read_settings(retriever, settings or [])
    with stages() as report:
        manifest = import_index(source, out, retriever, options, corpus, report, overwrite=overwrite)
    show_index(out, manifest, as_json)


def info(
    directory: IndexDirectory,
    corpus: Annotated[
        Path | None, typer.Option(help="Also check that the index was built from this corpus.")
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--verify", help="Read all files and compare their checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show the facts about an index and check that its files are whole: their sizes, or every byte.

    \b
    Example:
      srl index info my-index --verify
    """
    from srl.index import check_corpus, check_index, verify

    manifest = check_index(directory)
    if checksums:
        verify(directory, manifest)
        note(f"the checksums of all {len(manifest.files)} files are right")
    if corpus is not None:
        check_corpus(directory, corpus)
    show_index(directory, manifest, as_json)
