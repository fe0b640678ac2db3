"""`srl data coverage`: how many questions have their gold passages, and their answer, in the corpus."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from srl.cli import output
from srl.cli.options import Json, exclude
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.evaluate.coverage import Coverage, Share
    from srl.trajectory import Passage, Question

_MEASURES = {
    "gold": "gold passages", "some_gold": "at least one", "answer": "answer", "answerable": "answerable",
}  # fmt: skip


def coverage(
    data: Annotated[
        list[Path],
        typer.Argument(
            metavar="DATA…", help="Questions (Parquet, JSON lines), or a directory of srl data prepare."
        ),
    ],
    corpus: Annotated[
        list[Path] | None,
        typer.Option(help="Corpus file (repeatable); default: the corpus.jsonl of the directories."),
    ] = None,
    index: Annotated[
        list[Path] | None, typer.Option(help="Index directory, instead of --corpus (repeatable).")
    ] = None,
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
    from srl.evaluate.coverage import Share
    from srl.evaluate.coverage import coverage as cover

    files, default = _files(data)
    questions = _questions(files)
    passages, total = _passages(corpus or [], index or [], default)
    notes: list[str] = []
    with output.progress("passages read", total) as progress:
        coverages = cover(questions, passages, notes.append, progress)
    parts: dict[tuple[str, str], list[Coverage]] = {}
    for question in questions:
        parts.setdefault((question.split, question.data_source), []).append(coverages[question.id])
    if len(parts) > 1:
        parts["all", "all"] = list(coverages.values())
    shares = {
        part: {name: Share.of(getattr(each, name) for each in part_coverages) for name in _MEASURES}
        for part, part_coverages in parts.items()
    }
    for text in notes:
        output.note(f"note: {text}")
    if as_json:
        missing = [
            {"id": question.id, "question": question.text, "golden_answers": question.golden_answers,
             "split": question.split, **asdict(coverages[question.id])}
            for question in questions
            if coverages[question.id].answerable is False
        ]  # fmt: skip
        output.print_json({
            "parts": [
                {"split": split, "data_source": source, "questions": len(parts[split, source])}
                | {name: share._asdict() | {"share": share.value} for name, share in part_shares.items()}
                for (split, source), part_shares in shares.items()
            ],
            "notes": notes, "missing": missing,
        })  # fmt: skip
        return
    rows = [
        (*part, f"{len(parts[part]):,}", *(_cell(share, len(parts[part])) for share in part_shares.values()))
        for part, part_shares in shares.items()
    ]
    output.table(("split", "source", "questions", *_MEASURES.values()), rows)


def _cell(share: Share, questions: int) -> str:
    """`97.5%`, with the number of questions for which it is known unless that is all of them."""
    if share.value is None:
        return "unknown"
    return f"{share.value:.1%}" + (f" of {share.known:,}" if share.known < questions else "")


def _files(data: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The files of questions, and the corpora of the directories among `data`."""
    from srl.data.prepare import CORPUS
    from srl.data.splits import SPLITS

    files, corpora = [path for path in data if not path.is_dir()], []
    for folder in (path for path in data if path.is_dir()):
        parquets = [path for split in SPLITS if (path := folder / f"{split}.parquet").is_file()]
        if not parquets:
            raise UserError(f"{folder}: expected {', '.join(SPLITS)}.parquet or some of them, found none")
        files += parquets
        corpora += [path for path in [folder / CORPUS] if path.is_file()]
    return files, corpora


def _questions(files: Sequence[Path]) -> list[Question]:
    from srl.data.parquet import read_questions

    questions: dict[str, Question] = {}
    for file in files:
        for question in read_questions(file):
            if question.id in questions:
                raise UserError(f"{file}: question id {question.id!r} is also in another of the files")
            questions[question.id] = question
    return list(questions.values())


def _passages(
    corpus: Sequence[Path], index: Sequence[Path], default: Sequence[Path]
) -> tuple[Iterable[Passage], int | None]:
    """All passages of the corpora or the indexes, as a stream, and their number where it is known."""
    from srl.data.corpus import read_corpus
    from srl.index import check_index
    from srl.index.passages import open_passages

    exclude({"--corpus": bool(corpus), "--index": bool(index)}, "both say where the passages are")
    if index:
        for directory in index:
            if not check_index(directory).corpus_digest:
                raise UserError(f"{directory} searches an external service, whose passages cannot be read")
        stores = [open_passages(directory) for directory in index]
        return chain.from_iterable(stores), sum(map(len, stores))
    if not (corpus or default):
        raise UserError("no corpus to look in: give --corpus FILE or --index DIR")
    return chain.from_iterable(read_corpus(file) for file in corpus or default), None
