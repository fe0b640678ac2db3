"""The first rows of a file of questions or passages, for reading."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from srl.data.corpus import read_corpus
from srl.data.parquet import is_training_parquet, read_questions
from srl.data.published_rows import read_rows
from srl.data.trec import is_tagged
from srl.trajectory import Passage, Question


def first_rows(path: Path, number: int) -> list[Question] | list[Passage]:
    """The first `number` questions of a parquet or JSON-lines file, or passages of a corpus."""
    if path.is_dir():
        return list(islice(read_corpus(path), number))
    if is_training_parquet(path):
        return read_questions(path)[:number]
    first = None if is_tagged(path) else next(read_rows(path), None)
    if first is not None and "question" in first.row:
        return read_questions(path)[:number]
    return list(islice(read_corpus(path), number))


def rendered(row: Question | Passage) -> str:
    """A question or a passage as a few lines of text."""
    if isinstance(row, Passage):
        return f"{row.id}\n{row.contents}"
    lines = [row.id, f"question: {row.text}", f"answers: {' | '.join(row.golden_answers)}"]
    lines += [f"{message['role']}: {message['content'].strip()}" for message in row.prompt]
    lines += [f"{name}: {value}" for name, value in row.metadata.items()]
    return "\n".join(lines)
