"""`srl data`: get questions and corpora, look at them, make a world, train a tokenizer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from srl.cli import output

app = typer.Typer(
    no_args_is_help=True, help="Get questions and corpora: make a world, read published formats."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what this command wrote.")]


@app.command("list")
def list_sources(json: Json = False) -> None:
    """List the sources: what they hold, the files they are read from, where they come from.

    \b
    Example:
      srl data list
    """
    from srl.data.sources import SOURCES

    if json:
        output.print_json([_source(source) for source in SOURCES.values()])
        return
    rows = [
        (s.name, "corpus" if s.is_corpus else "questions", s.hub or "-", s.licence, s.what)
        for s in SOURCES.values()
    ]
    output.table(("source", "holds", "by name from", "licence", "what"), rows)


def _source(source: Any) -> dict[str, object]:
    names = ("name", "what", "files", "licence", "homepage", "data_source", "hub", "hub_files", "is_corpus")
    return {name: getattr(source, name) for name in names}


@app.command()
def prepare(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE[:SPLIT][=FILE,…]", help="What to read.")],
    file: Annotated[
        list[Path] | None, typer.Option(help="A file of the one SOURCE; may be repeated.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="The split the files are: train, validation or test.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to; a directory in the workspace by default.")
    ] = None,
    template: Annotated[
        str, typer.Option(help="A template's name, or a text file with {question}.")
    ] = "search-r1",
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most this many questions from each file.")
    ] = None,
    val: Annotated[
        float, typer.Option(min=0.0, help="Set training questions aside: a share (below 1) or a number.")
    ] = 0.0,
    corpus: Annotated[list[Path] | None, typer.Option(help="A corpus to add; may be repeated.")] = None,
    contexts: Annotated[
        bool, typer.Option(help="Paragraphs that come with questions join the corpus, or do not.")
    ] = True,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Turn published files into training parquet and a corpus.

    A SOURCE is a name of `srl data list`; without files it is had by name from the Hugging Face hub.
    Several sources are merged: `nq:train=a.jsonl hotpotqa:validation=b.json corpus=c.jsonl`.

    \b
    Example:
      srl data prepare squad=train-v1.1.json 2wiki-corpus=2wikimultihopqa_corpus.json --val 0.05
    """
    from srl.data.prepare import parse_input
    from srl.data.prepare import prepare as run
    from srl.errors import UserError

    if file and (len(sources) > 1 or "=" in sources[0]):
        raise UserError("--file goes with one SOURCE that names no files; for several write SOURCE=FILE,FILE")
    inputs = [parse_input(text, file or (), split) for text in sources]
    inputs += [parse_input("corpus", (path,)) for path in corpus or ()]
    large = any(each.source.is_corpus for each in inputs)
    with output.progress("passages written") if large else nullcontext() as update:
        made = run(
            inputs,
            out or _default_out(inputs),
            template=template,
            limit=limit,
            validation=val,
            contexts=contexts,
            overwrite=overwrite,
            progress=update,
        )
    for text in made.notes:
        output.note(text)
    if json:
        output.print_json(made)
    else:
        _print_prepared(made)


def _default_out(inputs: list[Any]) -> Path:
    """`worlds/` and the names of the sources, in the workspace."""
    from srl.workspace import Workspace

    names = dict.fromkeys(each.source.name for each in inputs)
    return Workspace.resolve().worlds / "+".join(names)


def _print_prepared(made: Any) -> None:
    for split, count in made.questions.items():
        output.line(f"{made.directory / split}.parquet  {count:,} questions")
    if made.passages:
        output.line(f"{made.directory / 'corpus.jsonl'}  {made.passages:,} passages")


@app.command()
def world(
    seed: Annotated[int, typer.Option(help="Another seed, another world.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Where to; a directory in the workspace by default.")
    ] = None,
) -> None:
    """Make up an encyclopedia that no model has read, and questions about it.

    \b
    Example:
      srl data world --seed 1
    """
    from srl.data.world import write_world
    from srl.workspace import Workspace

    directory = out or Workspace.resolve().worlds / f"world-s{seed}"
    write_world(directory, seed)
    output.line(directory)


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="Questions (.parquet, .jsonl) or a corpus (.jsonl, .json, .gz).")
    ],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="How many rows.")] = 3,
    json: Json = False,
) -> None:
    """Show the first rows of questions or of a corpus.

    \b
    Example:
      srl data show srl-workspace/worlds/world-s0/train.parquet -n 1
    """
    from srl.data.show import first_rows, rendered
    from srl.inputs import on_disk

    with on_disk(file) as path:
        rows = first_rows(path, number)
    if json:
        output.print_json(rows)
    else:
        output.line("\n\n".join(rendered(row) for row in rows))


@app.command()
def tokenizer(
    corpus: Annotated[list[Path], typer.Option(help="A corpus to learn from; may be repeated.")],
    out: Annotated[Path, typer.Option(help="Where to, a new directory.")],
    questions: Annotated[
        list[Path] | None, typer.Option(help="Questions to learn from too; may be repeated.")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens, 258 or more.")] = 4096,
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus.

    \b
    Example:
      srl data tokenizer --corpus corpus.jsonl --vocab-size 4096 --out my-tokenizer
    """
    from srl.data.tokenizer import texts_of, train_tokenizer

    size = train_tokenizer(texts_of(corpus, questions or ()), out, vocab_size, overwrite=overwrite)
    output.line(f"{out}  {size:,} tokens")
