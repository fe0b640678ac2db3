"""`srl index diff`: where two indexes rank the same questions differently."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.index.shared import LABELS, Answers, Qrels, Questions, figure_cells, notes
from srl.cli.layout import cell_len, cut
from srl.cli.options import Json

if TYPE_CHECKING:
    from srl.data.relevance import LabelledQuestions
    from srl.evaluate.index_diff import IndexDiff, MeasureDiff, RankingDiff
    from srl.evaluate.index_eval import SearchResults
    from srl.index import Index
    from srl.trajectory import Passage

_ID = 24
_COLUMN = 72
"""Widths of an id and of a hit without a terminal, in cells."""


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="Directory of one index.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Directory of the other index.")],
    questions: Questions,
    qrels: Qrels = None,
    answers: Answers = False,
    k: Annotated[int, typer.Option("-k", "--k", min=1, max=10_000, help="Number of hits to compare.")] = 10,
    show: Annotated[
        int, typer.Option(min=0, help="Number of questions to show, the most different first.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Compare two indexes: overlap, the questions on which they differ most, and which is better.

    Passages with the same id are the same. Overlap@k treats passages with equal scores at the cut as
    interchangeable; rank-biased overlap (p = .9) weights the top ranks most. If relevance is known, each
    measure is compared on the same questions, with the p-value of a paired randomisation test.

    \b
    Example:
      srl index diff plain stemmed --questions dev-v1.1.json
    """
    from srl.data.relevance import read_labelled_questions
    from srl.evaluate.index_diff import diff_indexes
    from srl.index import open_index

    labelled = read_labelled_questions(questions, qrels)
    one, other = open_index(a), open_index(b)
    with output.progress("asking questions", len(labelled.questions)) as progress:
        found = diff_indexes(one, other, labelled, k, "answers" if answers else None, progress)
    notes(found.notes)
    most = found.most_different(show)
    if as_json:
        output.print_json(_facts(one, other, labelled, found, most))
        return
    output.paragraph(f"A: {_in_words(one)}")
    output.paragraph(f"B: {_in_words(other)}")
    _print(found)
    for each in most:
        _print_lists((one, other), labelled, found, each)


def _print(found: IndexDiff) -> None:
    count = len(found.differences)
    output.line(f"\n{count:,} questions")
    rows = [
        (f"overlap@{found.k}", *figure_cells(found.overlap)),
        ("rank-biased overlap", *figure_cells(found.rbo)),
        ("the same first passage", f"{found.same_first / count:.4f}", f"{found.same_first:,} questions"),
        (
            f"the same {found.k} passages",
            f"{found.same_passages / count:.4f}",
            f"{found.same_passages:,} questions",
        ),
    ]
    output.table(("in common", "mean", "95% interval"), rows)
    if found.measures:
        output.line(f"\nby {LABELS[found.labels or 'judgements']}, the first {found.depth} hits")
        heads = ("measure", "A", "B", "B - A", "95% interval", "better", "worse", "p")
        output.table(heads, [_row(name, each) for name, each in found.measures.items()])


def _row(name: str, each: MeasureDiff) -> tuple[object, ...]:
    change, interval = figure_cells(each.change)
    signed = change if change.startswith("-") else f"+{change}"
    means = f"{each.a.mean:.4f}", f"{each.b.mean:.4f}"
    return name, *means, signed, interval, each.better, each.worse, f"{each.p:.4f}"


def _print_lists(
    indexes: tuple[Index, Index], labelled: LabelledQuestions, found: IndexDiff, each: RankingDiff
) -> None:
    """One question with what both find, side by side; * marks what is relevant."""
    question = next(one for one in labelled.questions if one.id == each.question)
    change = found.change(each.question)
    measured = f", {change[0]} {change[1]:.3f} in A and {change[2]:.3f} in B" if change else ""
    output.line(f"\n{question.text}\n({question.id}: overlap {each.overlap:.2f}{measured})")
    grades = labelled.judged.get(question.id, {})
    searched = zip(indexes, (found.a, found.b), strict=True)
    lists = [_passages(index, results, each.question, found.k) for index, results in searched]
    rows = []
    for rank in range(max(map(len, lists))):
        rows.append((rank + 1, *(_cell(passages[rank : rank + 1], grades) for passages in lists)))
    output.table(("", "A", "B"), rows)


def _passages(index: Index, results: SearchResults, question: str, k: int) -> list[Passage]:
    """The passages of the first `k` hits that were measured."""
    names = [name for name, _ in results.hits[question][:k]]
    if index.passages is None:
        return results.passages[question]
    return [index.passages[row] for name in names if (row := index.passages.row(name)) is not None]


def _cell(passages: list[Passage], grades: Mapping[str, int]) -> str:
    """A passage in few letters: its id, its title and the beginning of its text."""
    if not passages:
        return ""
    passage = passages[0]
    mark = "* " if grades.get(passage.id, 0) >= 1 else ""
    name = _short(passage.id, _ID)
    text = " ".join(f"{passage.title}: {passage.text}".split())
    return cut(f"{mark}[{name}] {text}", _column())


def _column() -> int:
    """Cells for each of two lists side by side."""
    from shutil import get_terminal_size

    return (get_terminal_size().columns - 8) // 2 if sys.stdout.isatty() else _COLUMN


def _short(text: str, width: int) -> str:
    """`text` with its middle left out where it is longer than `width`: the ends of ids tell them apart."""
    half = width // 2
    return text if cell_len(text) <= width else cut(text, width - half) + cut(text, half + 1, by_end=True)[1:]


def _in_words(index: Index) -> str:
    manifest = index.manifest
    options = " ".join(f"{name}={value}" for name, value in manifest.options.items())
    return (
        f"{index.directory} ({manifest.retriever} {options}, {manifest.passages:,} passages, "
        f"{index.digest[:12]})"
    )


def _facts(
    one: Index, other: Index, labelled: LabelledQuestions, found: IndexDiff, most: list[RankingDiff]
) -> dict[str, Any]:
    texts = {question.id: question.text for question in labelled.questions}
    return {
        "a": {"directory": one.directory, "digest": one.digest},
        "b": {"directory": other.directory, "digest": other.digest},
        "questions": len(found.differences),
        "k": found.k,
        "depth": found.depth,
        "overlap": found.overlap,
        "rbo": found.rbo,
        "same_first": found.same_first,
        "same_passages": found.same_passages,
        "labels": found.labels,
        "measures": found.measures,
        "most_different": [
            {
                "id": each.question,
                "question": texts[each.question],
                "overlap": each.overlap,
                "rbo": each.rbo,
                "change": found.change(each.question),
                "a": [name for name, _ in found.a.hits[each.question][: found.k]],
                "b": [name for name, _ in found.b.hits[each.question][: found.k]],
            }
            for each in most
        ],
        "notes": found.notes,
    }
