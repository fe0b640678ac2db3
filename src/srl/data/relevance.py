"""Questions with relevance judgements of passages, to measure a retriever with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.data.parquet import is_training_parquet, read_questions
from srl.data.published_rows import (
    Record,
    describe,
    first_character,
    is_parquet,
    read_each,
    read_rows,
    suffix_of,
)
from srl.data.question_formats import SQUAD, first_row_has, is_flashrag, read_format
from srl.data.trec import is_tagged, read_qrels, read_table_of_questions, read_topics
from srl.errors import UserError
from srl.files import beginning, input_name
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

    @property
    def has_answers(self) -> bool:
        return any(question.golden_answers for question in self.questions)


def read_labelled_questions(path: Path, qrels: Path | None = None) -> LabelledQuestions:
    """The questions of a file, with the judgements of `qrels`, or with the gold passages in their rows.

    Formats: TREC topics, `id <tab> question`, SQuAD, and parquet or JSON lines with a question in each row
    (ours, verl's, FlashRAG's, BEIR's). Raises UserError with the place of a malformed row, and where no
    judgement belongs to a question.
    """
    questions = read_any_questions(path)
    if qrels is not None:
        return _judged_by(questions, read_qrels(qrels), path, qrels)
    own = {question.id: _named(question) for question in questions}
    return LabelledQuestions(questions, {name: passages for name, passages in own.items() if passages})


def read_any_questions(path: Path) -> list[Question]:
    """The questions of a file of any format that `read_labelled_questions` knows. Raises UserError."""
    questions = list(_questions(path))
    if not questions:
        raise UserError(f"{path}: expected questions, found none")
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise UserError(f"{path}: two questions have the id {question.id!r}; ids must be unique")
        seen.add(question.id)
    return questions


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
    elif _is_squad(path):
        yield from read_format(SQUAD, path, "squad", "test")
    else:
        yield from read_each(read_rows(path), _question)


def _is_table(path: Path) -> bool:
    """Whether the lines are `id <tab> question`: by the file's name or, in a pipe, by the first line."""
    if path.is_file():
        return suffix_of(path) in (".tsv", ".txt")
    return first_character(path) not in "{[" and b"\t" in beginning(path).partition(b"\n")[0]


def _is_squad(path: Path) -> bool:
    """Whether the file is SQuAD's: `.json` with one object, or it begins with SQuAD's articles."""
    return (suffix_of(path) == ".json" and first_character(path) == "{") or _SQUAD.match(
        beginning(path)
    ) is not None


def _question(record: Record) -> Question:
    """The question in a row, with its id, answers and gold passages where the row has them."""
    named = any(record.row.get(name) is not None for name in _IDS)
    given = [name for name in _ANSWERS if record.row.get(name)]
    answers = record.answers(given[0]) if given else ()
    metadata = record.row.get("metadata") or {}
    if not isinstance(metadata, Mapping):
        raise record.error("an object in 'metadata'", describe(metadata))
    own = record.row.get("supporting_ids")
    support = {} if own is None else {"supporting_ids": own}
    name = record.text(*_IDS) if named else str(record.index)
    return Question(name, record.text(*_TEXTS), answers, metadata={**metadata, **support})


def _named(question: Question) -> dict[str, int]:
    """The gold passages that a question names, all with grade 1."""
    found: Any = question.metadata.get("supporting_ids") or ()
    if isinstance(found, str) or not isinstance(found, list | tuple):
        raise UserError(
            f"question {question.id}: expected a list of passages in supporting_ids, found {describe(found)}"
        )
    return {str(passage): 1 for passage in found}


def _judged_by(
    questions: list[Question], judged: dict[str, dict[str, int]], path: Path, qrels: Path
) -> LabelledQuestions:
    names, notes = _names(questions, judged)
    matched = {question.id: judged[name] for question, name in names if name in judged}
    if not matched:
        raise UserError(
            f"{qrels} judges none of the questions in {path}: its ids are {_some(judged)}, those of the "
            f"questions {_some(question.id for question in questions)}; give the qrels of these questions"
        )
    if unknown := len(judged) - len(matched):
        named = f"the {len(judged):,} questions in {input_name(qrels)}"
        notes.append(f"{unknown:,} of {named} are not in {input_name(path)}")
    return LabelledQuestions(questions, matched, tuple(notes))


def _names(
    questions: list[Question], judged: Mapping[str, object]
) -> tuple[list[tuple[Question, str]], list[str]]:
    """The name of each question in the qrels: its id, its id without source and split, or its position.

    Cranfield's topics have the numbers of a longer list, while its qrels count from 1 to 225, so matching by
    id would mix up questions. Where the qrels are numbered exactly 1 to the number of questions, and the ids
    are not, questions are matched by position.
    """
    places = [str(place) for place in range(1, len(questions) + 1)]
    ids = {question.id for question in questions}
    if set(judged) == set(places) and ids != set(places):
        note = f"the qrels number the questions 1 to {len(questions)}: matched by position in the file"
        return list(zip(questions, places, strict=True)), [note]
    if ids.isdisjoint(judged):
        return [(question, question.id.split("/", 2)[-1]) for question in questions], []
    return [(question, question.id) for question in questions], []


def _some(names: Any) -> str:
    """The first few of many names, for an error."""
    shown = [name for name, _ in zip(names, range(3), strict=False)]
    return ", ".join(shown) + ", …"
