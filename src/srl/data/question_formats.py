"""The published question formats (NQ, TriviaQA, HotpotQA, SQuAD, FlashRAG, …), and reading a file of one.

A format is a line of the table at the end: the names of its fields, and what else its rows know.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from srl.data.corpus import passage_of
from srl.data.published_rows import (
    Record,
    columns_of,
    describe,
    first_character,
    is_parquet,
    json_array,
    parquet_rows,
    read_each,
    read_rows,
    table_rows,
)
from srl.errors import UserError
from srl.files import beginning
from srl.trajectory import Passage, Question

Metadata = Callable[[Record, str], dict[str, Any]]
"""What a row says beside question and answers; the second argument is the data source."""


@dataclass(frozen=True, slots=True)
class Format:
    """A published format. Of the names of a field the first that a row has counts.

    `more` is a field of further answers. `hops` is the number of hops of all its questions, and `skipped`
    says why a row is left out (an unanswerable question, say). `passages` are the paragraphs of a row.
    """

    text: tuple[str, ...] = ("question",)
    answers: tuple[str, ...] = ("answer",)
    more: str = ""
    id: tuple[str, ...] = ("id",)
    metadata: Metadata = lambda record, source: {}
    passages: Callable[[Record, str], Iterable[Passage]] = lambda record, source: ()
    hops: int | None = None
    skipped: Callable[[Record], str] = lambda record: ""
    records: Callable[[Path], Iterator[Record]] = read_rows

    def rows(self, path: Path) -> Iterator[Record]:
        """The rows of a file as published, or in Parquet."""
        return parquet_rows(path) if is_parquet(path) else self.records(path)

    def question(self, record: Record, source: str, split: str, start: int = 0) -> Question:
        """The question in a row; its id is `<source>/<split>/<own id or index>`, counted from `start`."""
        answers = record.answers(*self.answers)
        if self.more and record.row.get(self.more):
            answers = tuple(dict.fromkeys((*answers, *record.answers(self.more))))
        if not answers:
            raise record.error("at least one answer (published test sets often come without)", "none")
        row_id = record.text(*self.id) if record.has(*self.id) else str(start + record.index)
        name = row_id if row_id.startswith(f"{source}/") else f"{source}/{split}/{row_id}"
        hops = {} if self.hops is None else {"hops": self.hops}
        metadata = {**hops, **self.metadata(record, source)}
        return Question(name, record.text(*self.text), answers, source, split, metadata=metadata)


def read_format(
    form: Format,
    path: Path,
    data_source: str,
    split: str,
    skipped: Counter[str] | None = None,
    start: int = 0,
) -> Iterator[Question]:
    """The questions of a published file; `skipped` counts the rows left out, by reason.

    FlashRAG's rows are accepted in place of any format, and Parquet with the same fields. Raises UserError
    with the place of a row that is malformed, has no answer or repeats an id, and for a file without
    questions.
    """
    form = replace(FLASHRAG, hops=form.hops) if is_flashrag(path) else form
    ids: set[str] = set()

    def read(record: Record) -> tuple[Record, Question | str]:
        return record, form.skipped(record) or form.question(record, data_source, split, start)

    for record, question in read_each(form.rows(path), read):
        if isinstance(question, str):
            if skipped is not None:
                skipped[question] += 1
            continue
        if question.id in ids:
            raise record.error("an id that no earlier question has", repr(question.id))
        ids.add(question.id)
        yield question
    if not ids:
        raise UserError(f"{path}: expected questions, found none")


def read_paragraphs(form: Format, path: Path, data_source: str) -> Iterator[Passage]:
    """The paragraphs that come with the questions of a published file, if any, each once."""
    form = FLASHRAG if is_flashrag(path) else form
    ids: set[str] = set()
    for passages in read_each(form.rows(path), lambda record: list(form.passages(record, data_source))):
        for passage in passages:
            if passage.id not in ids:
                ids.add(passage.id)
                yield passage


def is_flashrag(path: Path) -> bool:
    """Whether the rows of the file have `golden_answers`."""
    return first_row_has("golden_answers", path)


def first_row_has(name: str, path: Path) -> bool:
    """Whether the first line is JSON and has a field of this name, or a Parquet file such a column."""
    if is_parquet(path):
        return name in columns_of(path)
    first = beginning(path).decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0]
    return first.startswith(("{", "[")) and f'"{name}"' in first


# ---- Paragraphs and supporting facts, as HotpotQA has them


@dataclass(frozen=True, slots=True)
class _Paragraph:
    title: str
    passage: Passage
    sentences: list[str]


def _paragraphs(record: Record, source: str) -> Iterator[_Paragraph]:
    """The paragraphs in `context`: pairs `[title, sentences]`, or columns of them."""
    for title, sentences in _rows_of(record.row.get("context"), "title", "sentences", "content"):
        if not isinstance(sentences, list):
            raise record.error("pairs of [title, sentences] in 'context'", describe(sentences))
        texts = [record.valid(sentence, "context").strip() for sentence in sentences]
        yield _Paragraph(title, passage_of(record.valid(title, "context"), " ".join(texts), source), texts)


def _rows_of(value: Any, *columns: str) -> Iterable[Any]:
    """Rows as JSON has them, a list each, or of those of the `columns` that Parquet has."""
    if isinstance(value, dict):
        return zip(*(value[name] for name in columns if value.get(name) is not None), strict=True)
    if not all(isinstance(row, list) for row in value or ()):
        raise TypeError(f"expected a list in each place of {describe(value)}")
    return value or ()


def _context_passages(record: Record, source: str) -> Iterator[Passage]:
    return (paragraph.passage for paragraph in _paragraphs(record, source))


def _support(record: Record, source: str) -> dict[str, Any]:
    """Titles of the paragraphs that support the answer, and where given their passages' ids and the facts.

    They are in `supporting_facts`, or without sentence numbers in `supporting_titles`. Ids are in the order
    of the titles. A fact is `{title, id, text}`: without `text` where its number points to no sentence, and
    where all paragraphs of the row are one text.
    """
    rows = _rows_of(record.row.get("supporting_facts"), "title", "sent_id")
    facts = [(record.valid(title, "supporting_facts"), *number) for title, *number in rows]
    facts = facts or [
        (record.valid(title, "supporting_titles"),) for title in record.items("supporting_titles")
    ]
    if not facts:
        return {}
    titles = list(dict.fromkeys(title for title, *_ in facts))
    paragraphs = list(_paragraphs(record, source))
    ids = [each.passage.id for title in titles for each in paragraphs if each.title == title]
    if not ids:
        return {"supporting_titles": titles}
    in_sentences = any(len(each.sentences) > 1 for each in paragraphs)
    first = {each.title: each for each in reversed(paragraphs)}
    named_facts: list[dict[str, str]] = []
    for title, *numbers in facts:
        fact = {"title": title}
        if (paragraph := first.get(title)) is not None:
            fact["id"] = paragraph.passage.id
            number = numbers[0] if numbers else None
            if in_sentences and isinstance(number, int) and 0 <= number < len(paragraph.sentences):
                fact["text"] = paragraph.sentences[number]
        if fact not in named_facts:
            named_facts.append(fact)
    ids = list(dict.fromkeys(ids))
    return {"supporting_titles": titles, "supporting_ids": ids, "supporting_facts": named_facts}


def _hotpotqa(record: Record, source: str) -> dict[str, Any]:
    """HotpotQA: `type` and `level`; the full release has paragraphs and which of them support."""
    kinds = {name: record.text(name) for name in ("type", "level") if record.row.get(name)}
    return {**kinds, **_support(record, source)}


def _two_wiki(record: Record, source: str) -> dict[str, Any]:
    """2WikiMultihopQA: like HotpotQA, with the evidence as triples; their number is the number of hops."""
    metadata = _hotpotqa(record, source)
    rows = _rows_of(record.items("evidences"))
    triples = [[record.valid(part, "evidences") for part in (x, relation, y)] for x, relation, y in rows]
    return {**metadata, "hops": len(triples), "evidences": triples} if triples else metadata


# ---- The other formats


def _flashrag(record: Record, source: str) -> dict[str, Any]:
    """FlashRAG: `metadata` as it is, but for its paragraphs, which go only to the corpus."""
    inner = _flashrag_metadata(record)
    extra = {name: value for name, value in inner.row.items() if name not in ("context", "supporting_facts")}
    return {**_support(inner, source), **extra}


def _flashrag_passages(record: Record, source: str) -> Iterator[Passage]:
    return _context_passages(_flashrag_metadata(record), source)


def _flashrag_metadata(record: Record) -> Record:
    """The metadata as a row of its own; a plain `context` with a `title` becomes a titled paragraph."""
    inner = record.inner(record.row.get("metadata") or {}, "metadata")
    row, context = dict(inner.row), inner.row.get("context")
    if isinstance(context, str) and isinstance(title := row.get("title"), str):
        title = title.replace("_", " ")
        row |= {"context": [[title, [context]]], "supporting_titles": [title]}
    elif not isinstance(context, dict) and not (
        isinstance(context, list) and all(isinstance(paragraph, list) for paragraph in context)
    ):
        row.pop("context", None)
    return replace(inner, row=row)


def _nq(record: Record, source: str) -> dict[str, Any]:
    """NQ-open has neither; files made from NQ have the page's `title`, some the `paragraph` (QED's)."""
    titles = {"supporting_titles": [record.text("title")]} if record.row.get("title") else {}
    ids = [passage.id for passage in _nq_passages(record, source)]
    return {**titles, "supporting_ids": ids} if ids else titles


def _nq_passages(record: Record, source: str) -> Iterator[Passage]:
    if record.row.get("paragraph"):
        yield passage_of(record.text("title"), record.text("paragraph"), source)


def _musique(record: Record, source: str) -> dict[str, Any]:
    """MuSiQue: the id tells the hops (`3hop1__…`); each step of the decomposition names its passage."""
    metadata: dict[str, Any] = {}
    if match := re.match(r"((\d+)hop\d*)__", record.text("id")):
        metadata = {"hops": int(match[2]), "type": match[1]}
    paragraphs = list(zip(record.items("paragraphs"), _musique_passages(record, source), strict=True))
    if support := [(row["title"], passage.id) for row, passage in paragraphs if row.get("is_supporting")]:
        metadata["supporting_titles"] = list(dict.fromkeys(title.strip() for title, _ in support))
        metadata["supporting_ids"] = list(dict.fromkeys(name for _, name in support))
    ids = {row.get("idx", place): passage.id for place, (row, passage) in enumerate(paragraphs)}
    steps = []
    for step in record.items("question_decomposition"):
        inner = record.inner(step, "question_decomposition")
        fields = {"question": inner.text("question"), "answer": inner.text("answer")}
        passage_id = ids.get(step.get("paragraph_support_idx"))
        steps.append({**fields, "id": passage_id} if passage_id else fields)
    return {**metadata, "question_decomposition": steps} if steps else metadata


def _musique_passages(record: Record, source: str) -> Iterator[Passage]:
    for row in record.items("paragraphs"):
        inner = record.inner(row, "paragraphs")
        yield passage_of(inner.text("title"), inner.text("paragraph_text"), source)


def _triviaqa(record: Record, source: str) -> dict[str, Any]:
    """TriviaQA's pages; the hub's Parquet has them in columns."""
    if isinstance(pages := record.row.get("entity_pages"), dict):
        titles = record.inner(pages, "entity_pages").items("title")
    else:
        titles = [page["Title"] for page in record.items("EntityPages") if page.get("Title")]
    titles = [record.valid(title, "title") for title in titles]
    return {"supporting_titles": titles} if titles else {}


def _popqa(record: Record, source: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {name: record.row[name] for name in ("prop", "s_pop") if record.row.get(name)}
    title = {"supporting_titles": [record.text("s_wiki_title")]} if record.row.get("s_wiki_title") else {}
    return {**metadata, **title}


def _asearcher(record: Record, source: str) -> dict[str, Any]:
    return {"origin": record.text("source")} if record.row.get("source") else {}


def _squad_records(path: Path) -> Iterator[Record]:
    """One record per question of a SQuAD file, with the title and the text of its paragraph."""
    count = 0
    for article in json_array(path, "data"):
        title = article.text("title")
        for number, paragraph in enumerate(article.items("paragraphs"), start=1):
            place = f": {title}, paragraph {number}"
            outer = replace(article, place=place).inner(paragraph, "paragraphs")
            context = outer.text("context")
            for order, qa in enumerate(outer.items("qas"), start=1):
                row = {**outer.inner(qa, "qas").row, "title": title, "context": context}
                yield Record(path, f"{place}, question {order}", count, row)
                count += 1


def _squad(record: Record, source: str) -> dict[str, Any]:
    (passage,) = _squad_passages(record, source)
    return {"supporting_ids": [passage.id], "supporting_titles": [record.text("title").replace("_", " ")]}


def _squad_passages(record: Record, source: str) -> Iterator[Passage]:
    yield passage_of(record.text("title").replace("_", " "), record.text("context"), source)


def _impossible(record: Record) -> str:
    """SQuAD 2's questions without an answer; on the hub, whose answers are an empty object of lists."""
    answers = record.row.get("answers")
    empty = isinstance(answers, dict) and not record.answers("answers")
    return "impossible (SQuAD 2)" if record.row.get("is_impossible") or empty else ""


def _unanswerable(record: Record) -> str:
    return "unanswerable" if record.row.get("answerable") is False else ""


def _bamboogle_records(path: Path) -> Iterator[Record]:
    return read_rows(path) if first_character(path) in ("{", "[") else table_rows(path, ",")


FLASHRAG = Format(answers=("golden_answers",), metadata=_flashrag, passages=_flashrag_passages)
NQ_OPEN = Format(metadata=_nq, passages=_nq_passages, hops=1)
HOTPOTQA = Format(id=("_id", "id"), metadata=_hotpotqa, passages=_context_passages, hops=2)
TWO_WIKI = replace(HOTPOTQA, metadata=_two_wiki, hops=None)
MUSIQUE = Format(more="answer_aliases", metadata=_musique, passages=_musique_passages, skipped=_unanswerable)
TRIVIAQA = Format(
    text=("Question", "question"), answers=("Answer", "answer"), id=("QuestionId", "question_id"),
    metadata=_triviaqa, hops=1, records=partial(json_array, key="Data"),
)  # fmt: skip
POPQA = Format(
    answers=("possible_answers",), metadata=_popqa, hops=1, records=partial(table_rows, delimiter="\t")
)
BAMBOOGLE = Format(
    text=("Question", "question"), answers=("Answer", "answer"), id=(), hops=2, records=_bamboogle_records
)
ASEARCHER = Format(more="aug_answer", id=("qid", "idx", "id"), metadata=_asearcher)
SQUAD = Format(
    answers=("answers",), metadata=_squad, passages=_squad_passages, hops=1, skipped=_impossible,
    records=_squad_records,
)  # fmt: skip
