"""`srl index eval`: how well an index finds what answers the questions, and whether another is better."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from srl.browse.formatting import counted
from srl.cli import output
from srl.cli.index.shared import open_with
from srl.cli.options import Json, RetrieverSettings
from srl.errors import CheckFailed, UserError

if TYPE_CHECKING:
    from srl.data.relevance import LabelledQuestions
    from srl.evaluate.index_eval import IndexComparison, IndexEvaluation, ServedIndex
    from srl.index import Index

_LABELS = {"judgements": "the passages judged relevant", "answers": "the passages that contain an answer"}
"""What counts as relevant, in words."""
_SHOWN = 5
"""The most changed questions that a comparison shows; `--json` has all."""
_BEARABLE = 0.01
"""Largest share of failed searches; above it the exit code is 1."""


def evaluate(
    index: Annotated[
        str, typer.Argument(metavar="INDEX", help="Index directory, or URL of a search server.")
    ],
    questions: Annotated[
        Path,
        typer.Option(help="Parquet, JSON lines, SQuAD, TREC topics, or `ID <tab> QUESTION` lines."),
    ],
    qrels: Annotated[
        Path | None,
        typer.Option(help="Relevance judgements in TREC format: `question 0 passage grade` per line."),
    ] = None,
    answers: Annotated[
        bool,
        typer.Option(
            "--answers", help="Count passages that contain an answer as relevant, and ignore judgements."
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="INDEX", help="Also measure this index or server, and compare with it."),
    ] = None,
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
    called answer recall. With --against each measure is compared on the same questions, by a paired
    randomisation test, and overlap@10 says how many of the first ten passages both find.

    \b
    Example:
      srl index eval my-index --questions dev-v1.1.json
      srl index eval stemmed --against plain --questions dev-v1.1.json
    """
    from srl.data.relevance import read_labelled_questions
    from srl.evaluate.index_eval import OVERLAP_DEPTH, compare_indexes, evaluate_index

    depths = _read_depths(k)
    if against == index:
        raise UserError(f"--against names the same index, {index}", key="against", hint="name another one")
    labelled = read_labelled_questions(questions, qrels)
    indexes = {name: _open(name, settings or []) for name in (against, index) if name is not None}
    evaluations: dict[str, IndexEvaluation] = {}
    for name, searcher in indexes.items():
        with output.progress("asking questions", len(labelled.questions)) as progress:
            evaluations[name] = evaluate_index(
                searcher, labelled, depths, "answers" if answers else None, progress,
                least_depth=OVERLAP_DEPTH if against is None else 2 * OVERLAP_DEPTH,
            )  # fmt: skip
    for note in dict.fromkeys(note for evaluation in evaluations.values() for note in evaluation.notes):
        output.note(f"note: {note}")
    result = evaluations[index]
    if per_question is not None:
        _write(per_question, labelled, result)
    comparison = None if against is None else compare_indexes(evaluations[against], result)
    if as_json:
        facts = {name: _facts(indexes[name], evaluation) for name, evaluation in evaluations.items()}
        more = {} if against is None else {"against": facts[against], "comparison": comparison}
        output.print_json(facts[index] | more)
    else:
        letters = [""] if against is None else ["A: ", "B: "]
        for letter, searcher in zip(letters, indexes.values(), strict=True):
            output.line(letter + _in_words(searcher))
        questions_asked = counted(result.measured, "question")
        output.line(f"{questions_asked}, the first {result.depth} hits, by {_LABELS[result.labels]}")
        if comparison is None:
            rows = [(name, f"{mean.mean:.4f}", mean.in_words(4)) for name, mean in result.metrics.items()]
            output.table(("measure", "mean", "95% interval"), rows)
        else:
            _print(comparison, labelled)
    if result.failed > _BEARABLE * result.measured:
        raise CheckFailed(
            f"{result.failed:,} of {result.measured:,} searches failed; they count as empty results"
        )


def _read_depths(text: str) -> tuple[int, ...]:
    """The depths in `1,3,5`, sorted. Raises UserError for numbers outside 1 to 10,000."""
    parts = text.split(",")
    depths = sorted({int(part) for part in parts if part.strip().isdecimal()})
    if not all(part.strip().isdecimal() for part in parts) or depths[0] < 1 or depths[-1] > 10_000:
        raise UserError(f"--k {text}: expected numbers from 1 to 10,000, as in --k 1,3,10", key="k")
    return tuple(depths)


def _open(name: str, settings: list[str]) -> Index | ServedIndex:
    """The index or server of that name."""
    if "://" not in name:
        return open_with(Path(name), settings)
    from srl.evaluate.index_eval import ServedIndex

    if settings:
        raise UserError("--set applies to an index directory, not to a server", key="set")
    return ServedIndex(name)


def _facts(index: Any, result: IndexEvaluation) -> dict[str, Any]:
    if hasattr(index, "url"):
        about = {"url": index.url, "digest": index.digest or None}
    else:
        manifest = index.manifest.model_dump(include={"retriever", "options", "passages", "digest"})
        about = {"directory": index.directory, **manifest}
    names = ("labels", "measured", "failed", "depth", "metrics", "notes")
    facts = {name: getattr(result, name) for name in names}
    return {"index": about, "questions": result.asked, "seconds": result.seconds} | facts


def _in_words(index: Any) -> str:
    if hasattr(index, "url"):
        return str(index.url)
    about = index.manifest
    options = "".join(f" {name}={value}" for name, value in about.options.items())
    size = counted(about.passages, "passage")
    return f"{index.directory} ({about.retriever}{options}, {size}, {index.digest[:12]})"


def _print(comparison: IndexComparison, labelled: LabelledQuestions) -> None:
    """The measures of both indexes, and the questions that changed most."""
    from srl.evaluate.intervals import in_words

    rows = [
        (
            name, f"{diff.a.mean:.4f}", f"{diff.b.mean:.4f}", f"{diff.test.difference:+.4f}",
            in_words(diff.test.interval, 4, "+"), diff.better, diff.worse, f"{diff.test.p:.4f}",
        )
        for name, diff in comparison.measures.items()
    ]  # fmt: skip
    output.table(("measure", "A", "B", "B - A", "95% interval", "better", "worse", "p"), rows)
    output.line(f"overlap@10: {comparison.overlap.mean:.4f} ({comparison.overlap.in_words(4)})")
    texts = {question.id: question.text for question in labelled.questions}
    changed = [
        (name, f"{before:.3f}", f"{after:.3f}", f"{share:.2f}", texts[name])
        for name, before, after, share in comparison.changed[:_SHOWN]
    ]
    output.line("\nthe questions that changed most")
    output.table(("id", "A", "B", "overlap", "question"), changed)


def _write(path: Path, labelled: LabelledQuestions, result: IndexEvaluation) -> None:
    """Write one JSON object per measured question."""
    from srl.files import atomic_file

    with atomic_file(path) as file:
        for question in (each for each in labelled.questions if each.id in result.hits):
            row = {
                "id": question.id, "question": question.text,
                "metrics": {name: values[question.id] for name, values in result.values.items()},
                "judged": dict(labelled.judged.get(question.id, {})),
                "ranking": [passage for passage, _ in result.hits[question.id]],
                "error": result.failures.get(question.id),
            }  # fmt: skip
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
