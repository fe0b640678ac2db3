"""The published question formats: what one row of each says about a question and its paragraphs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from srl.data.corpus import passage_of
from srl.data.readers import Draft, Format, own_id, paragraphs, support
from srl.data.records import Record, describe, first_character, json_array, json_rows, table_rows
from srl.errors import UserError
from srl.trajectory import Passage


def nq_open(record: Record, source: str) -> Draft:
    """NQ-open: `question`, `answer` (a list)."""
    return Draft(record.text("question"), record.texts("answer"), own_id(record, "id"))


def hotpotqa(record: Record, source: str) -> Draft:
    """HotpotQA: `question, answer, type`; the full release has paragraphs and which of them support."""
    metadata = {name: record.text(name) for name in ("type", "level") if record.row.get(name)}
    return Draft(
        record.text("question"),
        record.texts("answer"),
        own_id(record, "_id", "id"),
        {**metadata, **support(record, source)},
    )


def two_wiki(record: Record, source: str) -> Draft:
    """2WikiMultihopQA: like HotpotQA, and its evidence triples say how many hops there are."""
    draft = hotpotqa(record, source)
    evidences = record.row.get("evidences")
    hops = {"hops": len(evidences)} if isinstance(evidences, list) and evidences else {}
    return Draft(draft.text, draft.answers, draft.own_id, {**hops, **draft.metadata})


def hotpot_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from (passage for _, passage in paragraphs(record, source))


def musique(record: Record, source: str) -> Draft | str:
    """MuSiQue: answer and aliases; the id says the hops (`3hop1__…`); unanswerable rows are skipped."""
    if record.row.get("answerable") is False:
        return "unanswerable"
    support = [pair for pair, supports in _musique_paragraphs(record, source) if supports]
    name, metadata = record.text("id"), {}
    if match := re.match(r"((\d+)hop\d*)__", name):
        metadata = {"hops": int(match[2]), "type": match[1]}
    if support:
        metadata["supporting_titles"] = list(dict.fromkeys(title for title, _ in support))
        metadata["supporting_ids"] = list(dict.fromkeys(passage.id for _, passage in support))
    aliases = record.texts("answer_aliases") if record.row.get("answer_aliases") else ()
    answers = tuple(dict.fromkeys((*record.texts("answer"), *aliases)))
    return Draft(record.text("question"), answers, name, metadata)


def _musique_paragraphs(record: Record, source: str) -> Iterator[tuple[tuple[str, Passage], bool]]:
    for row in record.optional_items("paragraphs"):
        if not isinstance(row, dict):
            raise record.error("objects in 'paragraphs'", describe(row))
        inner = Record(record.path, record.place, record.index, row)
        title = inner.text("title")
        passage = passage_of(title, inner.text("paragraph_text"), source)
        yield (title, passage), bool(row.get("is_supporting"))


def musique_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from (passage for (_, passage), _ in _musique_paragraphs(record, source))


def triviaqa(record: Record, source: str) -> Draft:
    """TriviaQA: the answer's value and all its aliases."""
    answer = record.row.get("Answer")
    if not isinstance(answer, dict):
        raise record.error("an object in 'Answer' (the test sets come without)", describe(answer))
    inner = Record(record.path, record.place, record.index, answer)
    names = [name for name in ("Value", "Aliases", "HumanAnswers") if answer.get(name)]
    answers = tuple(dict.fromkeys(text for name in names for text in inner.texts(name)))
    pages = record.optional_items("EntityPages")
    titles = [
        record.valid(page["Title"], "Title") for page in pages if isinstance(page, dict) and page.get("Title")
    ]
    metadata: dict[str, Any] = {"supporting_titles": titles} if titles else {}
    return Draft(record.text("Question"), answers, own_id(record, "QuestionId"), metadata)


def popqa(record: Record, source: str) -> Draft:
    """PopQA: `possible_answers` is a JSON list in a column of the table."""
    try:
        answers = json.loads(record.text("possible_answers"))
    except ValueError as error:
        raise record.error("a JSON list in 'possible_answers'", str(error)) from error
    if not isinstance(answers, list):
        raise record.error("a JSON list in 'possible_answers'", describe(answers))
    metadata: dict[str, Any] = {name: record.row[name] for name in ("prop", "s_pop") if record.row.get(name)}
    if record.row.get("s_wiki_title"):
        metadata["supporting_titles"] = [record.text("s_wiki_title")]
    inner = Record(record.path, record.place, record.index, {"possible_answers": answers})
    return Draft(record.text("question"), inner.texts("possible_answers"), own_id(record, "id"), metadata)


def bamboogle(record: Record, source: str) -> Draft:
    """Bamboogle: questions of two hops; `Question` and `Answer`, as a table or as JSON."""
    return Draft(record.text("Question", "question"), record.texts("Answer", "answer"), None, {"hops": 2})


def asearcher(record: Record, source: str) -> Draft:
    """ASearcher: `answer` and more accepted ones in `aug_answer`; the id is `qid`, `idx` or `id`."""
    more = record.texts("aug_answer") if record.row.get("aug_answer") else ()
    answers = tuple(dict.fromkeys((*record.texts("answer"), *more)))
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
    spans = [span.get("text") if isinstance(span, dict) else span for span in record.items("answers")]
    inner = Record(record.path, record.place, record.index, {"answers": spans})
    metadata = {
        "supporting_ids": [_squad_passage(record, source).id],
        "supporting_titles": [record.text("title").replace("_", " ")],
    }
    return Draft(record.text("question"), inner.texts("answers"), own_id(record, "id"), metadata)


def _squad_passage(record: Record, source: str) -> Passage:
    return passage_of(record.text("title").replace("_", " "), record.text("context"), source)


def squad_passages(record: Record, source: str) -> Iterator[Passage]:
    yield _squad_passage(record, source)


def bamboogle_records(path: Path) -> Iterator[Record]:
    return json_rows(path) if first_character(path) in ("{", "[") else table_rows(path, ",")


NQ_OPEN = Format(json_rows, nq_open)
HOTPOTQA = Format(json_rows, hotpotqa, hotpot_passages)
TWO_WIKI = Format(json_rows, two_wiki, hotpot_passages)
MUSIQUE = Format(json_rows, musique, musique_passages)
TRIVIAQA = Format(partial(json_array, key="Data"), triviaqa)
POPQA = Format(partial(table_rows, delimiter="\t"), popqa)
BAMBOOGLE = Format(bamboogle_records, bamboogle)
ASEARCHER = Format(json_rows, asearcher)
SQUAD = Format(squad_records, squad, squad_passages)
