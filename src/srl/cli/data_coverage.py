"""`srl data coverage`: how many questions have their gold passages, and their answer, in the corpus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.options import Json, exclude
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.evaluate.coverage import Coverage
    from srl.trajectory import Passage

_MEASURES = {"gold": "gold passages", "answer": "answer", "answerable": "answerable"}


def coverage(
    data: Annotated[
        Path,
        typer.Argument(help="Questions (Parquet, JSON lines), or a directory of srl data prepare."),
    ],
    corpus: Annotated[
        Path | None, typer.Option(help="Corpus file; default: the corpus.jsonl of the directory.")
    ] = None,
    index: Annotated[Path | None, typer.Option(help="Index directory, instead of --corpus.")] = None,
    as_json: Json = False,
) -> None:
    """Count the questions whose gold passages, and whose answer, the corpus has at all.

    Gold passages are the supporting_ids or supporting_titles of a question. A question is answerable if the
    corpus has all its gold passages and the text of a golden answer. What a question does not name is not
    asked of the corpus, and yes or no is no text to look for. --json also lists what is missing.

    \b
    Example:
      srl data coverage srl-workspace/worlds/world-s0
      srl data coverage test.parquet --index my-index
    """
    from srl.data.parquet import read_questions
    from srl.data.prepare import CORPUS
    from srl.data.splits import SPLITS
    from srl.evaluate.coverage import coverage as cover

    exclude({"--corpus": corpus is not None, "--index": index is not None}, "both say where the passages are")
    files = [data]
    if data.is_dir():
        files = [path for split in SPLITS if (path := data / f"{split}.parquet").is_file()]
        corpus = corpus or data / CORPUS
        if not files:
            raise UserError(f"{data} has no questions: expected one of {', '.join(SPLITS)}, a .parquet each")
    questions = [question for file in files for question in read_questions(file)]
    if repeated := [name for name, count in Counter(each.id for each in questions).items() if count > 1]:
        raise UserError(f"the question id {repeated[0]!r} is there twice")
    passages, total = _passages(corpus, index)
    with output.progress("passages read", total) as progress:
        coverages = cover(questions, passages, progress)
    parts: dict[tuple[str, str], list[Coverage]] = {}
    for question in questions:
        parts.setdefault((question.split, question.data_source), []).append(coverages[question.id])
    if len(parts) > 1:
        parts["all", "all"] = list(coverages.values())
    if as_json:
        missing = [
            {"id": question.id, "question": question.text, "golden_answers": question.golden_answers,
             "split": question.split, **asdict(coverages[question.id])}
            for question in questions
            if coverages[question.id].answerable is False
        ]  # fmt: skip
        output.print_json({"parts": [_counts(*part, of) for part, of in parts.items()], "missing": missing})
        return
    rows = [
        (*part, f"{len(of):,}", *(_cell(_labels(of, name), len(of)) for name in _MEASURES))
        for part, of in parts.items()
    ]
    output.table(("split", "source", "questions", *_MEASURES.values()), rows)


def _labels(coverages: Sequence[Coverage], name: str) -> list[bool]:
    """A measure of the questions for which it is known."""
    return [value for each in coverages if (value := getattr(each, name)) is not None]


def _counts(split: str, source: str, coverages: Sequence[Coverage]) -> dict[str, Any]:
    counts = {name: _labels(coverages, name) for name in _MEASURES}
    measures = {name: {"covered": sum(labels), "known": len(labels)} for name, labels in counts.items()}
    return {"split": split, "data_source": source, "questions": len(coverages), **measures}


def _cell(labels: Sequence[bool], questions: int) -> str:
    """`97.5%`, with the number of questions for which it is known unless that is all of them."""
    if not labels:
        return "unknown"
    share = sum(labels) / len(labels)
    return f"{share:.1%}" + (f" of {len(labels):,}" if len(labels) < questions else "")


def _passages(corpus: Path | None, index: Path | None) -> tuple[Iterable[Passage], int | None]:
    """All passages of the corpus or the index, as a stream, and their number where it is known."""
    from srl.data.corpus import read_corpus
    from srl.index import check_index
    from srl.index.passages import open_passages

    if index:
        if not check_index(index).corpus_digest:
            raise UserError(f"{index} searches an external service, whose passages cannot be read")
        store = open_passages(index)
        return store, len(store)
    if not corpus:
        raise UserError("no corpus to look in: give --corpus FILE or --index DIR")
    return read_corpus(corpus), None
