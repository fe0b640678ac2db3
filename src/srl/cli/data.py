"""`srl data`: prepare and show questions and corpora, generate a world."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from srl.browse.formatting import counted
from srl.cli import output
from srl.cli.data_coverage import coverage
from srl.cli.data_demonstrations import demonstrations
from srl.cli.options import Json, Overwrite, check_new
from srl.errors import UserError

_PASS_RATE = "avg(em) BETWEEN 0.1 AND 0.9"
"""Neither too hard for the model nor too easy: the questions that `prepare --from-log` keeps."""

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
    from srl.data.sources import SOURCES, Source

    if json:
        names = [field.name for field in fields(Source) if field.name != "format"]
        output.print_json([{name: getattr(source, name) for name in names} for source in SOURCES.values()])
        return
    output.table(
        ("source", "holds", "on the hub", "licence", "what"),
        [
            (source.name, "corpus" if source.is_corpus else "questions", source.hub or "-", source.licence,
             source.what)
            for source in SOURCES.values()
        ],
    )  # fmt: skip


@app.command()
def prepare(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE[:SPLIT][=FILE[,FILE…]]", help="What to read (several).")
    ],
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
    contexts: Annotated[
        bool, typer.Option(help="Add the paragraphs that come with questions to the corpus.")
    ] = True,
    passage_words: Annotated[
        int | None,
        typer.Option(min=10, help="Split passages of more words than this, at the ends of sentences."),
    ] = None,
    from_log: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Keep only questions whose episodes in this run satisfy --where."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Condition on a question's trajectories, such as a pass rate.",
            show_default=_PASS_RATE,
        ),
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Convert published files to training Parquet and a corpus.

    A SOURCE is a name from `srl data list`; without a file it is downloaded from the Hugging Face hub.
    Several sources are merged: `nq:train=a.jsonl hotpotqa:validation=b.json corpus=c.jsonl`.
    Passages with the same title and text become one, and questions name their gold passages by its id.
    With --passage-words they name the part with the answer. With --from-log only the questions are kept that
    a model answers so often: an evaluation of it with several samples (`srl eval run --n 8`) tells.

    \b
    Example:
      srl data prepare squad=train-v1.1.json 2wiki-corpus=2wikimultihopqa_corpus.json --val 0.05
      srl data prepare questions=q.parquet --from-log last --where "avg(em)<0.9"
    """
    from srl.data.prepare import CORPUS, parse_input
    from srl.data.prepare import prepare as run
    from srl.data.splits import parse_amounts
    from srl.workspace import Workspace

    inputs = [parse_input(text) for text in sources]
    if out is None:
        out = Workspace.resolve().worlds / "+".join(dict.fromkeys(each.source.name for each in inputs))
    check_new(out, overwrite, inputs=[path for each in inputs for path in each.files])
    only = None
    if where is not None and from_log is None:
        raise UserError("--where chooses by a log: add --from-log RUN, or leave it out", key="where")
    if from_log is not None:
        from srl.train.logged_episodes import questions_where

        chosen = _PASS_RATE if where is None else where
        only = questions_where(Workspace.resolve().find_run(from_log), chosen)
    large = any(each.source.is_corpus for each in inputs)
    with output.progress("passages written") if large else nullcontext() as update:
        prepared = run(
            inputs, out, template=template, limit=limit, validation=parse_amounts(val or []),
            contexts=contexts, passage_words=passage_words, only=only, overwrite=overwrite, progress=update,
        )  # fmt: skip
    for text in prepared.notes:
        output.note(text)
    if json:
        output.print_json(prepared)
        return
    for split, count in prepared.questions.items():
        output.line(f"{out / split}.parquet  {counted(count, 'question')}")
    if prepared.passages:
        merged = f", {prepared.merged:,} more of the same text" if prepared.merged else ""
        parts = f", some of them parts of {counted(prepared.split, 'long one')}" if prepared.split else ""
        output.line(f"{out / CORPUS}  {counted(prepared.passages, 'passage')}{parts}{merged}")


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


app.command()(demonstrations)
