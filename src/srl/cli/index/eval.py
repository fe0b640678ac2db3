"""`srl index eval`: how well an index finds what answers the questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.cli import output
from srl.cli.index.shared import (
    LABELS,
    Answers,
    Qrels,
    Questions,
    figure_cells,
    notes,
    open_with,
    read_depths,
)
from srl.cli.options import Json, RetrieverSettings
from srl.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from srl.data.relevance import LabelledQuestions
    from srl.evaluate.index_eval import IndexEvaluation
    from srl.evaluate.served_index import ServedIndex
    from srl.index import Index

_BEARABLE = 0.01
"""Largest share of failed searches; above it the exit code is 1."""


def evaluate(
    questions: Questions,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Index directory.", show_default=False)
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of a search server, instead of an index directory.")
    ] = None,
    qrels: Qrels = None,
    answers: Answers = False,
    k: Annotated[str, typer.Option("-k", "--k", help="Depths of recall@k.")] = "1,3,5,10,100",
    settings: RetrieverSettings = None,
    per_question: Annotated[
        Path | None, typer.Option(help="Also write the results per question to this file, as JSON lines.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure an index: recall@k, nDCG@10, MRR and MAP over questions, with 95% intervals.

    Relevant are the passages in --qrels, else the supporting_ids of the questions (SQuAD: the paragraph of a
    question). Without either, passages that contain a golden answer count as relevant, and the metric is
    called answer recall.

    \b
    Example:
      srl index eval my-index --questions dev-v1.1.json
    """
    from srl.data.relevance import read_labelled_questions
    from srl.evaluate.index_eval import evaluate_index

    depths = read_depths(k)
    labelled = read_labelled_questions(questions, qrels)
    index = _open(directory, url, settings or [])
    with output.progress("asking questions", len(labelled.questions)) as progress:
        found = evaluate_index(index, labelled, depths, "answers" if answers else None, progress)
    if per_question is not None:
        _write(per_question, labelled, found)
    notes(found.notes)
    if as_json:
        output.print_json(_facts(index, found))
    else:
        _print(index, found)
    if found.failed > _BEARABLE * found.measured:
        raise CheckFailed(
            f"{found.failed:,} of {found.measured:,} searches failed; they count as empty results"
        )


def _open(directory: Path | None, url: str | None, settings: list[str]) -> Index | ServedIndex:
    """The index or server to measure."""
    if (directory is None) == (url is None):
        raise UserError(
            "expected either a directory or a server: srl index eval DIR …, or srl index eval --url URL …"
        )
    if directory is None:
        from srl.evaluate.served_index import ServedIndex
        from srl.safe_text import refuse_credentials

        if settings:
            raise UserError(
                "--set applies to an index directory, not to a server; give it to srl serve retriever"
            )
        refuse_credentials("--url", str(url))
        return ServedIndex(str(url))
    return open_with(directory, settings)


def _named(index: Any) -> tuple[str, dict[str, Any]]:
    """What was measured, as text and as facts."""
    if hasattr(index, "url"):
        return index.url, {"url": index.url, "digest": index.digest or None}
    of = index.manifest
    facts = {"directory": index.directory, "retriever": of.retriever, "passages": of.passages}
    return f"{index.directory} ({of.retriever}, {of.passages:,} passages)", {**facts, "digest": of.digest}


def _facts(index: Any, found: IndexEvaluation) -> dict[str, Any]:
    return {
        "index": _named(index)[1],
        "labels": found.labels,
        "questions": found.asked,
        "measured": found.measured,
        "failed": found.failed,
        "depth": found.depth,
        "confidence": 0.95,
        "metrics": found.metrics,
        "seconds": found.searched.seconds,
        "notes": found.notes,
    }


def _print(index: Any, found: IndexEvaluation) -> None:
    output.line(
        f"{_named(index)[0]}: {found.measured:,} questions, the first {found.depth} hits, "
        f"by {LABELS[found.labels]}"
    )
    rows = [(name, *figure_cells(figure)) for name, figure in found.metrics.items()]
    output.table(("measure", "mean", "95% interval"), rows)


def _write(path: Path, labelled: LabelledQuestions, found: IndexEvaluation) -> None:
    """Write one JSON object per measured question."""
    from srl.files import atomic_file

    rankings = found.searched.rankings()
    with atomic_file(path) as file:
        for question in labelled.questions:
            if question.id in rankings:
                row = {
                    "id": question.id,
                    "question": question.text,
                    "metrics": found.of_question(question.id),
                    "judged": dict(labelled.judged.get(question.id, {})),
                    "ranking": rankings[question.id],
                    "error": found.searched.failures.get(question.id),
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
