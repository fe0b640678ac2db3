"""Reading a file of questions: what a format is, ids, answers and paragraphs, and FlashRAG's own rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srl.data.corpus import passage_of
from srl.data.records import Record, describe, json_rows
from srl.errors import UserError
from srl.inputs import beginning
from srl.trajectory import Passage, Question


@dataclass(frozen=True, slots=True)
class Draft:
    """What a row says about one question; reading adds data source, split and a unique id."""

    text: str
    answers: tuple[str, ...]
    own_id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Format:
    """A published format: its rows, the question in a row, the paragraphs that come with it.

    Functions of a row also take the data source. `draft` returns a text, the reason, for a row that the
    published set holds but nobody can be asked.
    """

    records: Callable[[Path], Iterator[Record]]
    draft: Callable[[Record, str], Draft | str]
    passages: Callable[[Record, str], Iterable[Passage]] | None = None


def read_format(
    form: Format,
    path: Path,
    data_source: str,
    split: str,
    skipped: Counter[str] | None = None,
    start: int = 0,
) -> Iterator[Question]:
    """The questions of a published file; `skipped` counts, by reason, the rows nobody can be asked.

    FlashRAG's JSON lines are taken in place of any format. Ids are `<data_source>/<split>/<own id or
    index>`; indexes count from `start`. Raises UserError with the place on a malformed row, one without
    an answer or with an id met before, and when there is no question at all.
    """
    form = FLASHRAG if is_flashrag(path) else form
    seen: set[str] = set()
    for record in form.records(path):
        draft = form.draft(record, data_source)
        if isinstance(draft, str):
            if skipped is not None:
                skipped[draft] += 1
            continue
        question = make_question(record, draft, data_source, split, start)
        if question.id in seen:
            raise record.error("an id that no question before it has", repr(question.id))
        seen.add(question.id)
        yield question
    if not seen:
        raise UserError(f"{path}: expected questions, found none")


def read_paragraphs(form: Format, path: Path, data_source: str) -> Iterator[Passage]:
    """The paragraphs that come with the questions of a published file, each once; none where none come."""
    form = FLASHRAG if is_flashrag(path) else form
    if form.passages is None:
        return
    seen: set[str] = set()
    for record in form.records(path):
        for passage in form.passages(record, data_source):
            if passage.id not in seen:
                seen.add(passage.id)
                yield passage


def make_question(record: Record, draft: Draft, data_source: str, split: str, start: int = 0) -> Question:
    """The question of a draft, under an id that is unique across data sets."""
    if not draft.answers:
        raise record.error("at least one answer (published test sets often come without)", "none")
    own = str(start + record.index) if draft.own_id is None else draft.own_id
    full = own if own.startswith(f"{data_source}/") else f"{data_source}/{split}/{own}"
    return Question(full, draft.text, draft.answers, data_source, split, metadata=draft.metadata)


def own_id(record: Record, *names: str) -> str | None:
    """The row's own id, when it has one."""
    return record.text(*names) if any(record.row.get(name) is not None for name in names) else None


def paragraphs(record: Record, source: str) -> Iterator[tuple[str, Passage]]:
    """Title and passage of each paragraph in `context`: pairs `[title, sentences]`, or columns of them."""
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
        text = " ".join(record.valid(sentence, "context").strip() for sentence in pair[1])
        yield title, passage_of(title, text, source)


def support(record: Record, source: str) -> dict[str, list[str]]:
    """Titles of the paragraphs that support the answer, and their passages' ids where they are given."""
    facts = record.row.get("supporting_facts") or []
    if isinstance(facts, dict):
        names = Record(record.path, record.place, record.index, facts).items("title")
    elif isinstance(facts, list) and all(isinstance(fact, list) and fact for fact in facts):
        names = [fact[0] for fact in facts]
    else:
        raise record.error("pairs of [title, sentence number] in 'supporting_facts'", describe(facts))
    titles = list(dict.fromkeys(record.valid(name, "supporting_facts") for name in names))
    if not titles:
        return {}
    ids = [passage.id for title, passage in paragraphs(record, source) if title in titles]
    found = {"supporting_titles": titles}
    return {**found, "supporting_ids": list(dict.fromkeys(ids))} if ids else found


def is_flashrag(path: Path) -> bool:
    """Whether the file holds JSON lines with `golden_answers`."""
    return first_row_has("golden_answers", path)


def first_row_has(name: str, path: Path) -> bool:
    """Whether the first line is JSON and has a field of this name."""
    first = beginning(path).decode("utf-8-sig", errors="replace").lstrip().partition("\n")[0]
    return first.startswith(("{", "[")) and f'"{name}"' in first


def flashrag(record: Record, source: str) -> Draft:
    """FlashRAG: `id, question, golden_answers, metadata`; its paragraphs go to the corpus alone."""
    inner = _flashrag_metadata(record)
    kept = {name: value for name, value in inner.row.items() if name not in ("context", "supporting_facts")}
    answers = record.texts("golden_answers")
    return Draft(record.text("question"), answers, own_id(record, "id"), {**support(inner, source), **kept})


def flashrag_passages(record: Record, source: str) -> Iterator[Passage]:
    yield from (passage for _, passage in paragraphs(_flashrag_metadata(record), source))


def _flashrag_metadata(record: Record) -> Record:
    """The metadata as a row of its own; a plain `context` with a `title` is made a titled paragraph."""
    given = record.row.get("metadata") or {}
    if not isinstance(given, dict):
        raise record.error("an object in 'metadata'", describe(given))
    row, context = dict(given), given.get("context")
    if isinstance(context, str) and isinstance(title := given.get("title"), str):
        title = title.replace("_", " ")
        row |= {"context": [[title, [context]]], "supporting_facts": [[title, 0]]}
    elif not isinstance(context, dict) and not _has_titles(context):
        row.pop("context", None)
    return Record(record.path, record.place, record.index, row)


def _has_titles(context: object) -> bool:
    return isinstance(context, list) and all(isinstance(paragraph, list) for paragraph in context)


FLASHRAG = Format(json_rows, flashrag, flashrag_passages)
