"""Questions in verl's training parquet, written and read; rows like FlashRAG's JSON lines are read too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from srl.data.published_rows import (
    Record,
    columns_of,
    describe,
    is_parquet,
    open_parquet,
    parquet_rows,
    read_each,
)
from srl.data.question_formats import FLASHRAG
from srl.data.splits import canonical_split, guess_split
from srl.errors import UserError
from srl.files import FORMAT, atomic_file, check_format
from srl.trajectory import Question

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_TRUTH = pa.struct([("target", pa.list_(pa.string()))])
_EXTRA = [("split", pa.string()), ("index", pa.int64())]
_EXTRA += [(name, pa.string()) for name in ("question", "id", "metadata")]
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(_MESSAGE)),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", _TRUTH)])),
        ("extra_info", pa.struct(_EXTRA)),
    ],
    metadata={"srl_format": str(FORMAT)},
)
"""verl's columns; `extra_info` also holds the question's text, its id and its metadata as JSON."""

_COLUMNS = (*SCHEMA.names, "question", "golden_answers", "reward_spec")
_ROWS = 4096
_QUESTION = re.compile(r"Question\s*:")


def write_questions(path: Path | str, questions: Iterable[Question]) -> int:
    """Write verl's training parquet, whole or not at all, and return the number of rows.

    `extra_info.index` counts the rows of the file. Raises UserError when there are none or two have one id.
    """
    ids: set[str] = set()
    with atomic_file(path, "wb") as file, pq.ParquetWriter(file, SCHEMA) as writer:
        numbered = enumerate(questions)
        while batch := list(islice(numbered, _ROWS)):
            for _, question in batch:
                if question.id in ids:
                    raise UserError(f"{path} was not written: two questions have the id {question.id!r}")
                ids.add(question.id)
            rows = [_row(question, index) for index, question in batch]
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
        if not ids:
            raise UserError(f"{path} was not written: there are no questions")
    return len(ids)


def _row(question: Question, index: int) -> dict[str, Any]:
    extra = {"split": question.split, "index": index, "question": question.text, "id": question.id}
    return {
        "data_source": question.data_source,
        "prompt": [dict(message) for message in question.prompt],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
        "extra_info": {**extra, "metadata": json.dumps(dict(question.metadata), ensure_ascii=False)},
    }


def read_questions(path: Path | str) -> list[Question]:
    """The questions of a training parquet (ours, Search-R1's, verl's) or of rows like FlashRAG's JSON lines.

    Without our extras the text is what follows `Question:` in the user's message and the id is
    `<data_source>/<split>/<index>`. Raises UserError with the row on a malformed one, on two with one id, and
    when there are none.
    """
    path = Path(path)
    questions: dict[str, Question] = {}
    for record, question in _read_parquet(path) if _is_verls(path) else _read_rows(path):
        if question.id in questions:
            raise record.error("an id that no earlier question has", repr(question.id))
        questions[question.id] = question
    if not questions:
        raise UserError(f"{path}: expected questions, found none")
    return list(questions.values())


def _read_rows(path: Path) -> Iterator[tuple[Record, Question]]:
    """Rows like FlashRAG's JSON lines; each may say its own split and data source."""
    stem = path.name.partition(".")[0]

    def read(record: Record) -> tuple[Record, Question]:
        source = record.text("data_source") if record.row.get("data_source") else stem
        name = record.text("split").lower() if record.row.get("split") else guess_split(path) or "train"
        try:
            split = canonical_split(name)
        except UserError as error:
            raise record.error("train, validation or test in 'split'", repr(name)) from error
        question = FLASHRAG.question(record, source, split)
        for key in ("supporting_ids", "supporting_titles"):
            names = question.metadata.get(key, [])
            if not (isinstance(names, list) and all(isinstance(name, str | int) for name in names)):
                raise record.error(f"a list of texts in 'metadata.{key}'", describe(names))
        return record, question

    yield from read_each(FLASHRAG.rows(path), read)


def _read_parquet(path: Path) -> Iterator[tuple[Record, Question]]:
    with open_parquet(path) as file:
        schema = file.schema_arrow
    version = (schema.metadata or {}).get(b"srl_format")
    if version is not None:
        check_format(path, int(version) if version.isdigit() else version.decode(errors="replace"))
    if not {"data_source", "prompt"} <= set(schema.names):
        raise UserError(
            f"{path}: expected a training parquet with the columns data_source, prompt, reward_model and "
            f"extra_info, found {', '.join(schema.names) or 'no column'}"
        )
    yield from read_each(parquet_rows(path, _COLUMNS), lambda record: (record, _question(record)))


def is_training_parquet(path: Path) -> bool:
    """Whether the file is Parquet with verl's columns."""
    return is_parquet(path) and {"data_source", "prompt"} <= set(columns_of(path))


def _is_verls(path: Path) -> bool:
    """Whether the file is Parquet, and not of rows like those of FlashRAG's JSON lines."""
    return is_training_parquet(path) or (is_parquet(path) and "question" not in columns_of(path))


def _question(record: Record) -> Question:
    """The question in a row, with or without our extras.

    Its text is our own, else the column `question`, else what the user's message asks.
    """
    extra = record.inner(record.row.get("extra_info") or {}, "extra_info").row
    prompt = record.items("prompt")
    source = record.text("data_source")
    if "id" not in extra:  # which only srl writes
        source = source.removeprefix("searchR1_")
    split = str(extra.get("split") or "train")
    index = record.index if extra.get("index") is None else extra["index"]
    text = extra.get("question") or record.row.get("question")
    if not text:
        texts = [message["content"] for message in prompt if message["role"] == "user"]
        text = _QUESTION.split(texts[-1])[-1].strip() if texts else None
    if not isinstance(text, str) or not text.strip():
        raise record.error("a question in extra_info, or after `Question:` in the prompt", "none")
    metadata = json.loads(extra["metadata"]) if isinstance(extra.get("metadata"), str) else {}
    return Question(
        id=str(extra.get("id") or f"{source}/{split}/{index}"),
        text=text,
        golden_answers=_answers(record, extra),
        data_source=source,
        split=split,
        prompt=tuple(prompt),
        metadata=record.inner(metadata, "extra_info.metadata").row,
    )


def _answers(record: Record, extra: Mapping[str, Any]) -> tuple[str, ...]:
    """The golden answers: `ground_truth.target`, verl's plain `ground_truth`, or `golden_answers`."""
    model = record.row.get("reward_model") or record.row.get("reward_spec") or {}
    truth = model.get("ground_truth")
    if "id" in extra and isinstance(truth, dict):  # which only srl writes: its answers are as they are
        return tuple(truth["target"])
    value = truth if truth is not None else record.row.get("golden_answers")
    answers = () if value is None else replace(record, row={"ground_truth": value}).answers("ground_truth")
    if not answers:
        raise record.error("answers in reward_model.ground_truth.target", describe(value))
    return answers
