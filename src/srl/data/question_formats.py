"""The published question formats (NQ, TriviaQA, HotpotQA, SQuAD, FlashRAG, …), and reading a file of one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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


@dataclass(frozen=True, slots=True)
class Draft:
    """The question in one row; reading adds data source, split and a unique id."""

    text: str
    answers: tuple[str, ...]
    own_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """A published format: how to read its rows, the question of a row, and the paragraphs that come with it.

    Functions of a row also take the data source. `draft` returns a string, the reason, for a row that is
    skipped (an unanswerable question, say). `hops` is the number of hops of all its questions.
    """

    records: Callable[[Path], Iterator[Record]]
    draft: Callable[[Record, str], Draft | str]
    passages: Callable[[Record, str], Iterable[Passage]] | None = None
    hops: int | None = None

    def rows(self, path: Path) -> Iterator[Record]:
        """The rows of a file as published, or in Parquet."""
        return parquet_rows(path) if is_parquet(path) else self.records(path)


def read_format(
    form: Format,
    path: Path,
    data_source: str,
    split: str,
    skipped: Counter[str] | None = None,
    start: int = 0,
) -> Iterator[Question]:
    """The questions of a published file; `skipped` counts the rows left out, by reason.

    FlashRAG's rows are accepted in place of any format, and Parquet with the same fields. Ids are
    `<data_source>/<split>/<own id or
    index>`; indexes count from `start`. Raises UserError with the place of a row that is malformed, has no
    answer or repeats an id, and for a file without questions.
    """
    form = replace(FLASHRAG, hops=form.hops) if is_flashrag(path) else form
    seen: set[str] = set()
    drafts = read_each(form.rows(path), lambda record: (record, form.draft(record, data_source)))
    for record, draft in drafts:
        if isinstance(draft, str):
            if skipped is not None:
                skipped[draft] += 1
            continue
        question = make_question(record, _with_hops(draft, form.hops), data_source, split, start)
        if question.id in seen:
            raise record.error("an id that no earlier question has", repr(question.id))
        seen.add(question.id)
        yield question
    if not seen:
        raise UserError(f"{path}: expected questions, found none")


def _with_hops(draft: Draft, hops: int | None) -> Draft:
    """The draft with the hops of its format, where its row says nothing of them."""
    if hops is None:
        return draft
    return replace(draft, metadata={"hops": hops, **draft.metadata})


def read_paragraphs(form: Format, path: Path, data_source: str) -> Iterator[Passage]:
    """The paragraphs that come with the questions of a published file, if any, each once."""
    form = FLASHRAG if is_flashrag(path) else form
    if form.passages is None:
        return
    seen: set[str] = set()
    for record in form.rows(path):
        for passage in form.passages(record, data_source):
            if passage.id not in seen:
                seen.add(passage.id)
                yield passage


def make_question(record: Record, draft: Draft, data_source: str, split: str, start: int = 0) -> Question:
    """The question of a draft, with an id that is unique across data sets."""
    if not draft.answers:
        raise record.error("at least one answer (published test sets often come without)", "none")
    own = str(start + record.index) if draft.own_id is None else draft.own_id
    full = own if own.startswith(f"{data_source}/") else f"{data_source}/{split}/{own}"
    return Question(full, draft.text, draft.answers, data_source, split, metadata=draft.metadata)


def own_id(record: Record, *names: str) -> str | None:
    """The row's own id, if it has one."""
    return record.text(*names) if any(record.row.get(name) is not None for name in names) else None


class Paragraph(NamedTuple):
    """A paragraph that comes with a question, whole and in sentences."""

    title: str
    passage: Passage
    sentences: list[str]


def paragraphs(record: Record, source: str) -> Iterator[Paragraph]:
    """The paragraphs in `context`: pairs `[title, sentences]`, or columns of them."""
    context = record.row.get("context") or []
    if isinstance(context, dict):
        inner = Record(record.path, record.place, record.index, context)
        titles, texts = (
            inner.items("title"),
            inner.items("sentences" if "sentences" in context else "content"),
        )
        if len(titles) != len(texts):
            raise record.error("as many titles as texts in 'context'", f"{len(titles)} and {len(texts)}")
        context = list(zip(titles, texts, strict=True))
    if not isinstance(context, list):
        raise record.error("pairs of [title, sentences] in 'context'", describe(context))
    for pair in context:
        if not (isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[1], list)):
            raise record.error("pairs of [title, sentences] in 'context'", describe(pair))
        title = record.valid(pair[0], "context")
        sentences = [record.valid(sentence, "context").strip() for sentence in pair[1]]
        yield Paragraph(title, passage_of(title, " ".join(sentences), source), sentences)


def support(record: Record, source: str) -> dict[str, Any]:
    """Titles of the paragraphs that support the answer, and where given their passages' ids and the facts.

    They are in `supporting_facts`, or without sentence numbers in `supporting_titles`. Ids are in the order
    of the titles.
    """
    facts = _facts(record)
    titles = list(dict.fromkeys(title for title, _ in facts))
    if not titles:
        return {}
    given = list(paragraphs(record, source))
    ids = [each.passage.id for title in titles for each in given if each.title == title]
    found: dict[str, Any] = {"supporting_titles": titles}
    if ids:
        found |= {"supporting_ids": list(dict.fromkeys(ids))}
        found |= {"supporting_facts": _with_texts(facts, given)}
    return found


def _facts(record: Record) -> list[tuple[str, object]]:
    """Title and sentence number of each supporting fact; None for a number that is not given."""
    facts = record.row.get("supporting_facts") or [
        [name] for name in record.optional_items("supporting_titles")
    ]
    if isinstance(facts, dict):
        inner = Record(record.path, record.place, record.index, facts)
        names = inner.items("title")
        numbers = inner.optional_items("sent_id")
        facts = [[name, *numbers[place : place + 1]] for place, name in enumerate(names)]
    if not (isinstance(facts, list) and all(isinstance(fact, list) and fact for fact in facts)):
        raise record.error("pairs of [title, sentence number] in 'supporting_facts'", describe(facts))
    return [(record.valid(fact[0], "supporting_facts"), fact[1] if len(fact) > 1 else None) for fact in facts]


def _with_texts(facts: list[tuple[str, object]], given: list[Paragraph]) -> list[dict[str, str]]:
    """`{title, id, text}` of each fact, in order and without repeats; `text` is the sentence.

    Without `text` where the number points to no sentence, and where all paragraphs of the row are one text.
    """
    found: list[dict[str, str]] = []
    in_sentences = any(len(each.sentences) > 1 for each in given)
    for title, number in facts:
        paragraph = next((each for each in given if each.title == title), None)
        fact = {"title": title}
        if paragraph is not None:
            fact["id"] = paragraph.passage.id
            if in_sentences and isinstance(number, int) and 0 <= number < len(paragraph.sentences):
                fact["text"] = paragraph.sentences[number]
        if fact not in found:
            found.append(fact)
    return found


def is_flashrag(path: Path) -> bool:
    """Whether the rows of the file have `golden_answers`."""
    return first_row_has("golden_answers", path)


def first_row_has(name: str, path: Path) -> bool:
    """Whether the first line is JSON and has a field of this name, or a Parquet file such a column."""
    if is_parquet(path):
        return name in columns_of(path)
    first = beginning(path).decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0]
    return first.startswith(("{", "[")) and f'"{name}"' in first


def flashrag(record: Record, source: str) -> Draft:
    """FlashRAG: `id, question, golden_answers, metadata`; its paragraphs go only to the corpus."""
    inner = _flashrag_metadata(record)
    kept = {name: value for name, value in inner.row.items() if name not in ("context", "supporting_facts")}
    answers = record.answers("golden_answers")
    return Draft(record.text("question"), answers, own_id(record, "id"), {**support(inner, source), **kept})


def flashrag_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from hotpot_passages(_flashrag_metadata(record), source)


def _flashrag_metadata(record: Record) -> Record:
    """The metadata as a row of its own; a plain `context` with a `title` becomes a titled paragraph."""
    given = record.row.get("metadata") or {}
    if not isinstance(given, dict):
        raise record.error("an object in 'metadata'", describe(given))
    row, context = dict(given), given.get("context")
    if isinstance(context, str) and isinstance(title := given.get("title"), str):
        title = title.replace("_", " ")
        row |= {"context": [[title, [context]]], "supporting_titles": [title]}
    elif not isinstance(context, dict) and not _has_titles(context):
        row.pop("context", None)
    return Record(record.path, record.place, record.index, row)


def _has_titles(context: object) -> bool:
    return isinstance(context, list) and all(isinstance(paragraph, list) for paragraph in context)


FLASHRAG = Format(read_rows, flashrag, flashrag_passages)


def nq_open(record: Record, source: str) -> Draft:
    """NQ-open: `question`, `answer` (a list); files made from NQ also have the page's `title`, and some the
    `paragraph` that answers (QED's)."""
    metadata: dict[str, Any] = (
        {"supporting_titles": [record.text("title")]} if record.row.get("title") else {}
    )
    if own := list(nq_passages(record, source)):
        metadata["supporting_ids"] = [passage.id for passage in own]
    return Draft(record.text("question"), record.answers("answer"), own_id(record, "id"), metadata)


def nq_passages(record: Record, source: str) -> Iterator[Passage]:
    if record.row.get("paragraph"):
        yield passage_of(record.text("title"), record.text("paragraph"), source)


def hotpotqa(record: Record, source: str) -> Draft:
    """HotpotQA: `question, answer, type`; the full release has paragraphs and which of them support."""
    metadata = {name: record.text(name) for name in ("type", "level") if record.row.get(name)}
    return Draft(
        record.text("question"),
        record.answers("answer"),
        own_id(record, "_id", "id"),
        {**metadata, **support(record, source)},
    )


def two_wiki(record: Record, source: str) -> Draft:
    """2WikiMultihopQA: like HotpotQA, with the evidence as triples; their number is the number of hops."""
    draft = hotpotqa(record, source)
    evidences = [_triple(record, triple) for triple in record.optional_items("evidences")]
    found = {"hops": len(evidences), "evidences": evidences} if evidences else {}
    return Draft(draft.text, draft.answers, draft.own_id, {**draft.metadata, **found})


def _triple(record: Record, triple: object) -> list[str]:
    if not (isinstance(triple, list) and len(triple) == 3):
        raise record.error("triples [subject, relation, object] in 'evidences'", describe(triple))
    return [record.valid(part, "evidences") for part in triple]


def hotpot_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from (paragraph.passage for paragraph in paragraphs(record, source))


def musique(record: Record, source: str) -> Draft | str:
    """MuSiQue: answer and aliases; the id tells the hops (`3hop1__…`); unanswerable rows are skipped."""
    if record.row.get("answerable") is False:
        return "unanswerable"
    given = list(_musique_paragraphs(record, source))
    support = [(title, passage) for title, passage, row in given if row.get("is_supporting")]
    name = record.text("id")
    metadata: dict[str, Any] = {}
    if match := re.match(r"((\d+)hop\d*)__", name):
        metadata = {"hops": int(match[2]), "type": match[1]}
    if support:
        metadata["supporting_titles"] = list(dict.fromkeys(title for title, _ in support))
        metadata["supporting_ids"] = list(dict.fromkeys(passage.id for _, passage in support))
    if steps := record.optional_items("question_decomposition"):
        ids = {row.get("idx", place): passage.id for place, (_, passage, row) in enumerate(given)}
        metadata["question_decomposition"] = [_step(record, step, ids) for step in steps]
    aliases = record.answers("answer_aliases") if record.row.get("answer_aliases") else ()
    answers = tuple(dict.fromkeys((*record.answers("answer"), *aliases)))
    return Draft(record.text("question"), answers, name, metadata)


def _step(record: Record, step: object, ids: Mapping[object, str]) -> dict[str, str]:
    """`{question, answer, id}` of one hop; `id` is that of its passage. `#1` stands for the first answer."""
    if not isinstance(step, dict):
        raise record.error("objects in 'question_decomposition'", describe(step))
    inner = Record(record.path, record.place, record.index, step)
    found = {"question": inner.text("question"), "answer": inner.text("answer")}
    own = ids.get(step.get("paragraph_support_idx"))
    return found if own is None else {**found, "id": own}


def _musique_paragraphs(record: Record, source: str) -> Iterator[tuple[str, Passage, Mapping[str, Any]]]:
    """Title, passage and row of each paragraph."""
    for row in record.optional_items("paragraphs"):
        if not isinstance(row, dict):
            raise record.error("objects in 'paragraphs'", describe(row))
        inner = Record(record.path, record.place, record.index, row)
        title = inner.text("title")
        yield title, passage_of(title, inner.text("paragraph_text"), source), row


def musique_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from (passage for _, passage, _ in _musique_paragraphs(record, source))


def triviaqa(record: Record, source: str) -> Draft:
    """TriviaQA: the answer's value and all its aliases. The hub's Parquet has other names of fields."""
    if isinstance(pages := record.row.get("entity_pages"), dict):
        titles = replace(record, row=pages).optional_items("title")
    else:
        pages = record.optional_items("EntityPages")
        titles = [page["Title"] for page in pages if isinstance(page, dict) and page.get("Title")]
    titles = [record.valid(title, "title") for title in titles]
    metadata: dict[str, Any] = {"supporting_titles": titles} if titles else {}
    answers = record.answers("Answer", "answer")
    return Draft(
        record.text("Question", "question"), answers, own_id(record, "QuestionId", "question_id"), metadata
    )


def popqa(record: Record, source: str) -> Draft:
    """PopQA: `possible_answers` is a JSON list in a column of the table."""
    metadata: dict[str, Any] = {name: record.row[name] for name in ("prop", "s_pop") if record.row.get(name)}
    if record.row.get("s_wiki_title"):
        metadata["supporting_titles"] = [record.text("s_wiki_title")]
    return Draft(record.text("question"), record.answers("possible_answers"), own_id(record, "id"), metadata)


def bamboogle(record: Record, source: str) -> Draft:
    """Bamboogle: questions of two hops; `Question` and `Answer`, as a table or as JSON."""
    return Draft(record.text("Question", "question"), record.answers("Answer", "answer"))


def asearcher(record: Record, source: str) -> Draft:
    """ASearcher: `answer` and more accepted ones in `aug_answer`; the id is `qid`, `idx` or `id`."""
    more = record.answers("aug_answer") if record.row.get("aug_answer") else ()
    answers = tuple(dict.fromkeys((*record.answers("answer"), *more)))
    metadata = {"origin": record.text("source")} if record.row.get("source") else {}
    return Draft(record.text("question"), answers, own_id(record, "qid", "idx", "id"), metadata)


def squad_records(path: Path) -> Iterator[Record]:
    """One record per question of a SQuAD file, with the title and the text of its paragraph."""
    count = 0
    for article in json_array(path, "data"):
        title = article.text("title")
        for number, paragraph in enumerate(article.items("paragraphs"), start=1):
            place = f": {title}, paragraph {number}"
            if not isinstance(paragraph, dict):
                raise UserError(f"{path}{place}: expected a JSON object, found {describe(paragraph)}")
            outer = Record(path, place, count, paragraph)
            context = outer.text("context")
            for order, qa in enumerate(outer.items("qas"), start=1):
                row = {**qa, "title": title, "context": context} if isinstance(qa, dict) else {}
                yield Record(path, f"{place}, question {order}", count, row)
                count += 1


def squad(record: Record, source: str) -> Draft | str:
    """SQuAD: the spans that annotators marked; version 2's impossible questions are skipped."""
    if record.row.get("is_impossible"):
        return "impossible (SQuAD 2)"
    answers = record.answers("answers")
    if not answers and isinstance(record.row["answers"], dict):  # the hub's Parquet of SQuAD 2
        return "impossible (SQuAD 2)"
    metadata = {
        "supporting_ids": [_squad_passage(record, source).id],
        "supporting_titles": [record.text("title").replace("_", " ")],
    }
    return Draft(record.text("question"), answers, own_id(record, "id"), metadata)


def _squad_passage(record: Record, source: str) -> Passage:
    return passage_of(record.text("title").replace("_", " "), record.text("context"), source)


def squad_passages(record: Record, source: str) -> Iterator[Passage]:
    yield _squad_passage(record, source)


def bamboogle_records(path: Path) -> Iterator[Record]:
    return read_rows(path) if first_character(path) in ("{", "[") else table_rows(path, ",")


NQ_OPEN = Format(read_rows, nq_open, nq_passages, hops=1)
HOTPOTQA = Format(read_rows, hotpotqa, hotpot_passages, hops=2)
TWO_WIKI = Format(read_rows, two_wiki, hotpot_passages)
MUSIQUE = Format(read_rows, musique, musique_passages)
TRIVIAQA = Format(partial(json_array, key="Data"), triviaqa, hops=1)
POPQA = Format(partial(table_rows, delimiter="\t"), popqa, hops=1)
BAMBOOGLE = Format(bamboogle_records, bamboogle, hops=2)
ASEARCHER = Format(read_rows, asearcher)
SQUAD = Format(squad_records, squad, squad_passages, hops=1)
