"""Questions with relevance judgements of passages, to measure a retriever with."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from srl.data.parquet import is_training_parquet, read_questions
from srl.data.published_rows import (
    Record,
    first_character,
    is_parquet,
    read_each,
    read_rows,
    suffix_of,
)
from srl.data.question_formats import SQUAD, first_row_has, is_flashrag, read_format
from srl.data.trec import is_tagged, read_qrels, read_table_of_questions, read_topics
from srl.errors import UserError
from srl.files import beginning
from srl.trajectory import Question

_IDS = ("id", "_id", "qid", "query_id", "query-id")
_TEXTS = ("question", "query", "text")
_ANSWERS = ("golden_answers", "answers", "answer")
_SQUAD = re.compile(rb'\s*{\s*("version"\s*:\s*"[^"]*"\s*,\s*)?"data"\s*:\s*\[')


@dataclass(frozen=True, slots=True)
class LabelledQuestions:
    """Questions, and the grades of the judged passages by question id: `{question: {passage: grade}}`.

    `notes` tell the user how questions and judgements were matched.
    """

    questions: Sequence[Question]
    judged: Mapping[str, Mapping[str, int]]
    notes: tuple[str, ...] = ()


def read_labelled_questions(path: Path, qrels: Path | None = None) -> LabelledQuestions:
    """The questions of a file, with the judgements of `qrels`, or with the gold passages in their rows.

    Formats: TREC topics, `id <tab> question`, SQuAD, and parquet or JSON lines with a question in each row
    (ours, verl's, FlashRAG's, BEIR's). Raises UserError with the place of a malformed row, and where no
    judgement belongs to a question.
    """
    questions = list(_questions(path))
    if not questions:
        raise UserError(f"{path}: expected questions, found none")
    name, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise UserError(f"{path}: two questions have the id {name!r}; ids must be unique")
    if qrels is not None:
        return _judged_by(questions, read_qrels(qrels), path, qrels)
    judgements = {question.id: _gold_grades(question) for question in questions}
    return LabelledQuestions(questions, {name: passages for name, passages in judgements.items() if passages})


def _questions(path: Path) -> Iterator[Question]:
    if is_training_parquet(path):
        yield from read_questions(path)
    elif is_parquet(path):
        yield from read_each(read_rows(path), _question)
    elif is_tagged(path):
        yield from (Question(name, text, ()) for name, text in read_topics(path))
    elif _is_table(path):
        yield from (Question(name, text, ()) for name, text in read_table_of_questions(path))
    elif is_flashrag(path) and not first_row_has("supporting_ids", path):
        yield from read_questions(path)
    elif _SQUAD.match(beginning(path)) or (suffix_of(path) == ".json" and first_character(path) == "{"):
        yield from read_format(SQUAD, path, "squad", "test")
    else:
        yield from read_each(read_rows(path), _question)


def _is_table(path: Path) -> bool:
    """Whether the lines are `id <tab> question`, by the file's name."""
    return suffix_of(path) in (".tsv", ".txt")


def _question(record: Record) -> Question:
    """The question in a row, with its id, answers and gold passages where the row has them."""
    answers = [name for name in _ANSWERS if record.row.get(name)]
    metadata = record.inner(record.row.get("metadata") or {}, "metadata").row
    if record.has("supporting_ids"):
        metadata = {**metadata, "supporting_ids": record.items("supporting_ids")}
    name = record.text(*_IDS) if record.has(*_IDS) else str(record.index)
    text = record.text(*_TEXTS)
    return Question(name, text, record.answers(answers[0]) if answers else (), metadata=metadata)


def _gold_grades(question: Question) -> dict[str, int]:
    """The gold passages that a question names, all with grade 1."""
    names = question.metadata.get("supporting_ids") or ()
    if not isinstance(names, list | tuple):
        raise UserError(f"question {question.id}: supporting_ids is no list of passages")
    return {str(name): 1 for name in names}


def _judged_by(
    questions: list[Question], judged: dict[str, dict[str, int]], path: Path, qrels: Path
) -> LabelledQuestions:
    """The questions with the judgements of each: by its id, its id without source and split, or its position.

    Cranfield's topics have the numbers of a longer list, while its qrels count from 1 to 225, so matching by
    id would mix up questions. Where the qrels are numbered exactly 1 to the number of questions, and the ids
    are not, questions are matched by position.
    """
    notes = []
    ids = [question.id for question in questions]
    places = [str(place) for place in range(1, len(questions) + 1)]
    if set(judged) == set(places) != set(ids):
        notes.append(f"the qrels number the questions 1 to {len(questions)}: matched by position in the file")
        names = places
    elif judged.keys().isdisjoint(ids):
        names = [name.split("/", 2)[-1] for name in ids]
    else:
        names = ids
    matched = {own: judged[name] for own, name in zip(ids, names, strict=True) if name in judged}
    if not matched:
        examples = f"its ids are like {next(iter(judged))}, those of the questions like {ids[0]}"
        raise UserError(f"{qrels} judges none of the questions in {path}: {examples}")
    if unknown := len(judged) - len(matched):
        total = f"the {len(judged):,} questions in {qrels.name}"
        notes.append(f"{unknown:,} of {total} are not in {path.name}")
    return LabelledQuestions(questions, matched, tuple(notes))
