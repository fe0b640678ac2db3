"""`srl index`: build an index from a corpus, look into one, search one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.index import Manifest
    from srl.trajectory import Hit

app = typer.Typer(no_args_is_help=True, help="Build an index from a corpus, and look into it.")

IndexDirectory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the index.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def build(
    corpus: Annotated[Path, typer.Option(help="The corpus: JSON lines of passages, .gz too.")],
    out: Annotated[Path, typer.Option(help="The directory to build; it appears whole or not at all.")],
    retriever: Annotated[str, typer.Option(help="The retriever that will search it.")] = "bm25",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the retriever; may come again."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an index that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Build the index of a corpus.

    \b
    Example:
      srl index build --corpus corpus.jsonl --out my-index --set k1=0.9
    """
    from srl.index import build_index

    options = read_settings(retriever, settings or [])
    with _progress() as progress:
        manifest = build_index(corpus, out, retriever, options, progress, overwrite=force)
    _show(out, manifest, as_json)


@app.command()
def info(
    directory: IndexDirectory,
    corpus: Annotated[
        Path | None, typer.Option(help="Also check that the index was built from this corpus.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what an index is, and check that its files are whole.

    \b
    Example:
      srl index info my-index --corpus corpus.jsonl
    """
    from srl.index import check_corpus, check_index

    manifest = check_index(directory)
    if corpus is not None:
        check_corpus(directory, corpus)
    _show(directory, manifest, as_json)


@app.command()
def search(
    directory: IndexDirectory,
    queries: Annotated[list[str], typer.Argument(metavar="QUERY…", help="What to look for; - reads lines.")],
    topk: Annotated[int, typer.Option("-k", "--topk", min=1, help="Hits for each query.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Search an index.

    \b
    Example:
      srl index search my-index "who wrote the origin of species" -k 3
    """
    from srl.index import open_index

    wanted = _lines() if queries == ["-"] else queries
    found = open_index(directory).search(wanted, topk)
    if as_json:
        output.print_json([_as_json(*pair) for pair in zip(wanted, found, strict=True)])
        return
    for query, hits in zip(wanted, found, strict=True):
        _print_hits(query if len(wanted) > 1 else "", hits)


def read_settings(retriever: str, settings: list[str]) -> dict[str, Any]:
    """`k1=.9` or `retriever.bm25.k1=.9` as options; values are read as YAML. Raises UserError."""
    from srl.config.yamltext import parse

    options: dict[str, Any] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key.strip():
            raise UserError(f"--set {setting}: expected KEY=VALUE, as in --set k1=0.9")
        options[key.strip().removeprefix(f"retriever.{retriever}.")] = parse(value, f"--set {setting}")
    return options


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int | None], None]]:
    """One bar for each stage of a build, one after the other."""
    with ExitStack() as stack:
        running: dict[str, Callable[[int], None]] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in running:
                stack.close()
                running[stage] = stack.enter_context(output.progress(f"{stage} passages", total))
            running[stage](done)

        yield report


def _show(directory: Path, manifest: Manifest, as_json: bool) -> None:
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
        "bytes": sum(int(mark.partition("-")[0]) for mark in manifest.files.values()),
    }
    if as_json:
        output.print_json(facts)
        return
    facts["options"] = " ".join(f"{name}={value}" for name, value in manifest.options.items()) or "none"
    facts |= {name: f"{facts[name]:,}" for name in ("passages", "bytes")}
    for name, value in facts.items():
        print(f"{name.replace('_', ' '):<18}{value}")


def _lines() -> list[str]:
    lines = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not lines:
        raise UserError("no query on standard input; expected one on each line")
    return lines


def _as_json(query: str, hits: list[Hit]) -> dict[str, Any]:
    rows = [{"id": hit.passage.id, "contents": hit.passage.contents, "score": hit.score} for hit in hits]
    return {"query": query, "hits": rows}


def _print_hits(query: str, hits: list[Hit]) -> None:
    if query:
        print(f"? {query}")
    if not hits:
        print("no hits")
    for rank, hit in enumerate(hits, start=1):
        text = " ".join(hit.passage.text.split())
        print(f"{rank}  {hit.score:.3f}  {hit.passage.id}  {hit.passage.title}: {text}")
