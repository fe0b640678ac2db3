"""`srl data coverage`: how many questions have their gold passages, and their answer, in the corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.options import Json, Overwrite, check_new, exclude
from srl.errors import UserError

if TYPE_CHECKING:
    from srl.evaluate.coverage import Coverage, CoverageShares, Share
    from srl.trajectory import Passage, Question

_HEADS = ("split", "source", "questions", "gold passages", "at least one", "answer", "answerable")
_SPLITS = ("train", "validation", "test")


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
    missing: Annotated[
        Path | None,
        typer.Option(help="Also write the questions that the corpus does not cover, as JSON lines."),
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Count the questions whose gold passages, and whose answer, the corpus has at all.

    Gold passages are the supporting_ids or supporting_titles of a question. A question is answerable if the
    corpus has all its gold passages and the text of a golden answer. What a question does not name is not
    asked of the corpus, and yes or no is no text to look for.

    \b
    Example:
      srl data coverage srl-workspace/worlds/world-s0
      srl data coverage test.parquet --index my-index --missing missing.jsonl
    """
    from srl.evaluate.coverage import coverage as cover

    files, default = _files(data)
    check_new(missing, overwrite, "--missing", [*files, *(corpus or default), *(index or [])])
    questions = _questions(files)
    notes: list[str] = []
    with (
        _passages(corpus or [], index or [], default) as (passages, total),
        output.progress("passages read", total) as progress,
    ):
        found = cover(questions, passages, notes.append, progress)
    shares = dict(_shares(questions, found))
    if missing is not None:
        notes.append(f"{missing}: {_write_missing(missing, questions, found):,} questions not covered")
    for text in notes:
        output.note(f"note: {text}")
    if as_json:
        output.print_json({"parts": [_facts(*item) for item in shares.items()], "notes": notes})
    else:
        output.table(_HEADS, [_row(*item) for item in shares.items()])


def _files(data: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The files of questions, and the corpora of the directories among `data`."""
    from srl.data.prepare import CORPUS

    files, corpora = [], []
    for path in data:
        if not path.is_dir():
            files.append(path)
            continue
        own = [path / f"{split}.parquet" for split in _SPLITS]
        files += [file for file in own if file.is_file()]
        corpora += [file for file in [path / CORPUS] if file.is_file()]
        if not any(file.is_file() for file in own):
            raise UserError(
                f"{path}: expected {', '.join(file.name for file in own)} or some of them, found none"
            )
    return files, corpora


def _questions(files: Sequence[Path]) -> list[Question]:
    from srl.data.parquet import read_questions

    found: dict[str, Question] = {}
    for file in files:
        for question in read_questions(file):
            if question.id in found:
                raise UserError(f"{file}: question id {question.id!r} is also in another of the files")
            found[question.id] = question
    return list(found.values())


@contextmanager
def _passages(
    corpus: Sequence[Path], index: Sequence[Path], default: Sequence[Path]
) -> Iterator[tuple[Iterable[Passage], int | None]]:
    """All passages of the corpora or the indexes, as a stream, and their number where it is known."""
    from srl.data.corpus import read_corpus
    from srl.evaluate.corpus_scan import Stores
    from srl.index import check_index
    from srl.index.passages import open_passages

    exclude({"--corpus": bool(corpus), "--index": bool(index)}, "both say where the passages are")
    if index:
        for directory in index:
            if not check_index(directory).corpus_digest:
                raise UserError(f"{directory} searches an external service, whose passages cannot be read")
        stores = Stores(map(open_passages, index))
        yield stores, len(stores)
        return
    if not (corpus or default):
        raise UserError("no corpus to look in: give --corpus FILE or --index DIR")
    yield chain.from_iterable(read_corpus(file) for file in corpus or default), None


def _shares(
    questions: Sequence[Question], found: Mapping[str, Coverage]
) -> Iterator[tuple[tuple[str, str], CoverageShares]]:
    """The shares of each split and data source, then of all questions if there are several of these."""
    from srl.evaluate.coverage import CoverageShares

    parts: dict[tuple[str, str], list[Coverage]] = {}
    for question in questions:
        parts.setdefault((question.split, question.data_source), []).append(found[question.id])
    for part, rows in parts.items():
        yield part, CoverageShares.of(rows)
    if len(parts) > 1:
        yield ("all", "all"), CoverageShares.of(found.values())


def _row(part: tuple[str, str], shares: CoverageShares) -> tuple[str, ...]:
    cells = (_cell(getattr(shares, name), shares.questions) for name in _MEASURES)
    return (*part, f"{shares.questions:,}", *cells)


_MEASURES = ("gold", "some_gold", "answer", "answerable")


def _cell(share: Share, questions: int) -> str:
    """`97.5%`, with the number of questions for which it is known unless that is all of them."""
    if share.value is None:
        return "unknown"
    return f"{share.value:.1%}" + (f" of {share.known:,}" if share.known < questions else "")


def _facts(part: tuple[str, str], shares: CoverageShares) -> dict[str, Any]:
    split, source = part
    facts: dict[str, Any] = {"split": split, "data_source": source, "questions": shares.questions}
    for name in _MEASURES:
        share: Share = getattr(shares, name)
        facts[name] = {"covered": share.covered, "known": share.known, "share": share.value}
    return facts


def _write_missing(path: Path, questions: Sequence[Question], found: Mapping[str, Coverage]) -> int:
    """Write one JSON object for each question that is not answerable, and return their number."""
    from srl.files import atomic_file

    lacking = [question for question in questions if found[question.id].answerable is False]
    with atomic_file(path) as file:
        for question in lacking:
            those = found[question.id]
            row = {
                "id": question.id,
                "question": question.text,
                "golden_answers": question.golden_answers,
                "data_source": question.data_source,
                "split": question.split,
                "gold": those.gold,
                "missing": those.missing,
                "answer": those.answer,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(lacking)
