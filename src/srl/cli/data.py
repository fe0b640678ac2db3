"""`srl data`: prepare and show questions and corpora, generate a world, train a tokenizer."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from srl.cli import output
from srl.cli.data_coverage import coverage
from srl.cli.data_demonstrations import demonstrations
from srl.cli.options import Json, Overwrite, check_new

app = typer.Typer(
    no_args_is_help=True, help="Get questions and corpora: make a world, read published formats."
)


@app.command("list")
def list_sources(json: Json = False) -> None:
    """List the known sources: content, file formats and origin.

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
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE[:SPLIT][=FILE,…]", help="Source to read.")],
    file: Annotated[list[Path] | None, typer.Option(help="File of the only SOURCE (repeatable).")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the files: train, validation or test.")] = None,
    out: Annotated[Path | None, typer.Option(help="Output directory; default: in the workspace.")] = None,
    template: Annotated[
        str, typer.Option(help="Prompt template: a name, or a text file with {question}.")
    ] = "search-r1",
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of questions from each file.")
    ] = None,
    val: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SOURCE=]NUMBER",
            help="Hold out training questions for validation: a share (below 1) or a number, of all or of a "
            "data source (repeatable).",
        ),
    ] = None,
    corpus: Annotated[list[Path] | None, typer.Option(help="Corpus to add (repeatable).")] = None,
    contexts: Annotated[
        bool, typer.Option(help="Add the paragraphs that come with questions to the corpus.")
    ] = True,
    merge: Annotated[
        bool,
        typer.Option(help="Merge passages with the same title and text (24 to 48 bytes of memory each)."),
    ] = True,
    passage_words: Annotated[
        int | None,
        typer.Option(min=10, help="Split passages of more words than this, at the ends of sentences."),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Convert published files to training Parquet and a corpus.

    A SOURCE is a name from `srl data list`. Without files it is downloaded from the Hugging Face hub.
    Several sources are merged: `nq:train=a.jsonl hotpotqa:validation=b.json corpus=c.jsonl`.
    Passages with the same title and text become one, and questions name their gold passages by its id.
    With --passage-words they name the part with the answer.

    \b
    Example:
      srl data prepare squad=train-v1.1.json 2wiki-corpus=2wikimultihopqa_corpus.json --val 0.05
    """
    from srl.data.prepare import parse_input
    from srl.data.prepare import prepare as run
    from srl.data.splits import parse_amounts
    from srl.errors import UserError

    if file and (len(sources) > 1 or "=" in sources[0]):
        raise UserError(
            "--file needs exactly one SOURCE without files; for several sources write SOURCE=FILE,FILE"
        )
    inputs = [parse_input(text, file or (), split) for text in sources]
    inputs += [parse_input("corpus", (path,)) for path in corpus or ()]
    out = out or _default_out(inputs)
    check_new(out, overwrite, inputs=[path for each in inputs for path in each.files])
    large = any(each.source.is_corpus for each in inputs)
    with output.progress("passages written") if large else nullcontext() as update:
        made = run(
            inputs,
            out,
            template=template,
            limit=limit,
            validation=parse_amounts(val or []),
            contexts=contexts,
            merge=merge,
            passage_words=passage_words,
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
    """The workspace's `worlds/` and the names of the sources."""
    from srl.workspace import Workspace

    names = dict.fromkeys(each.source.name for each in inputs)
    return Workspace.resolve().worlds / "+".join(names)


def _print_prepared(made: Any) -> None:
    for split, count in made.questions.items():
        output.line(f"{made.directory / split}.parquet  {count:,} questions")
    if made.passages:
        merged = f", {made.merged:,} more were the same" if made.merged else ""
        split = f", some of them parts of {made.split:,} long ones" if made.split else ""
        output.line(f"{made.directory / 'corpus.jsonl'}  {made.passages:,} passages{split}{merged}")
    if made.gold.keys() - {"unnamed"}:
        output.line(f"gold passages  {_gold_line(made.gold)}")


def _gold_line(gold: dict[str, int]) -> str:
    """How many questions have their gold passages in the corpus, and how they were found."""
    words = {
        "text": "questions by text",
        "title": "by title",
        "missing": "have some that were not found",
        "unnamed": "name none",
    }
    return ", ".join(f"{gold[by]:,} {text}" for by, text in words.items() if gold.get(by))


@app.command()
def world(
    seed: Annotated[int, typer.Option(help="Seed of the world.")] = 0,
    kind: Annotated[
        Literal["tiny", "tiny-hard"],
        typer.Option(help="tiny-hard: names are alike, a second search is not taught."),
    ] = "tiny",
    out: Annotated[Path | None, typer.Option(help="Output directory; default: in the workspace.")] = None,
) -> None:
    """Generate a fictional encyclopedia, which no model has seen, and questions about it.

    \b
    Example:
      srl data world --seed 1
    """
    from srl.data.write_world import world_name, write_world
    from srl.workspace import Workspace

    directory = out or Workspace.resolve().worlds / world_name(kind, seed)
    write_world(directory, seed, kind)
    output.line(directory)


@app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="Questions or a corpus: any file that srl data prepare reads.")
    ],
    number: Annotated[int, typer.Option("-n", "--number", min=1, help="Number of rows.")] = 3,
    json: Json = False,
) -> None:
    """Show the first rows of questions or of a corpus.

    \b
    Example:
      srl data show srl-workspace/worlds/world-s0/train.parquet -n 1
    """
    from srl.data.show import first_rows, rendered

    rows = first_rows(file, number)
    if json:
        output.print_json(rows)
    else:
        output.line("\n\n".join(rendered(row) for row in rows))


app.command()(coverage)


@app.command()
def tokenizer(
    corpus: Annotated[list[Path], typer.Option(help="Corpus to train on (repeatable).")],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    questions: Annotated[
        list[Path] | None, typer.Option(help="Questions to train on as well (repeatable).")
    ] = None,
    vocab_size: Annotated[int, typer.Option(help="Vocabulary size, at least 258.")] = 4096,
    overwrite: Overwrite = False,
) -> None:
    """Train a byte-level BPE tokenizer on a corpus.

    \b
    Example:
      srl data tokenizer --corpus corpus.jsonl --vocab-size 4096 --out my-tokenizer
    """
    from srl.data.tokenizer import texts_of, train_tokenizer

    check_new(out, overwrite, inputs=[*corpus, *(questions or [])])
    size = train_tokenizer(texts_of(corpus, questions or ()), out, vocab_size, overwrite=overwrite)
    output.line(f"{out}  {size:,} tokens")


app.command()(demonstrations)
