"""TREC's files: topics, relevance judgements (qrels) and documents.

They look like XML but are not: tags are left open, and documents have no common root. So they are read by
their tags, without an XML parser.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from srl.data.published_rows import Record, first_character, open_text
from srl.errors import UserError, parsing

_NUMBER = re.compile(r"<num>\s*(?:Number:\s*)?([^\s<]+)", re.IGNORECASE)
_TITLE = re.compile(r"<title>\s*(?:Topic:)?([^<]*)", re.IGNORECASE)
_TAGS = {"id": "docno", "title": "title", "text": "text"}
_MARKUP = re.compile(r"</?[a-z][a-z0-9]*>", re.IGNORECASE)
_END = re.compile(r"(?<=</doc>)", re.IGNORECASE)
_HEADERS = ("query-id", "query_id", "qid", "id")
"""First columns of a header line, which BEIR's tables have and TREC's do not."""


@contextmanager
def _text(path: Path) -> Iterator[IO[str]]:
    """Open the file. Raises UserError where it is not text, or a broken gzip file."""
    with parsing(path), open_text(path) as file:
        yield file


def is_tagged(path: Path) -> bool:
    """Whether the file begins with a tag, as TREC's do."""
    return first_character(path) == "<"


def read_topics(path: Path) -> Iterator[tuple[str, str]]:
    """`(id, text)` of each topic; the text is the topic's title. Raises UserError with its position."""
    with _text(path) as file:
        topics = _contents(file.read(), "top")
    if not topics:
        raise UserError(f"{path}: expected topics, <top> … </top>, found none")
    for place, topic in enumerate(topics, start=1):
        number, title = _NUMBER.search(topic), _TITLE.search(topic)
        if number is None or title is None or not title[1].strip():
            raise UserError(f"{path}: topic {place}: expected <num> and <title>, found {_excerpt(topic)}")
        yield number[1], " ".join(html.unescape(title[1]).split())


def read_table_of_questions(path: Path) -> Iterator[tuple[str, str]]:
    """`(id, text)` of each line `id <tab> text`. Raises UserError naming file and line."""
    with _text(path) as file:
        for number, line in enumerate(file, start=1):
            name, tab, text = line.rstrip("\n").partition("\t")
            if not line.strip() or (number == 1 and name in _HEADERS):
                continue
            if not (tab and name.strip() and text.strip()):
                raise UserError(f"{path}:{number}: expected ID <tab> QUESTION, found {_excerpt(line)}")
            yield name.strip(), text.strip()


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """The grade of each judged passage, by question: `{question: {passage: grade}}`.

    A line is TREC's `question iteration passage grade`, or `question passage grade` as in BEIR's tables.
    Grades below 1 mean not relevant. Raises UserError with file and line for anything else, and for two
    different grades of one passage.
    """
    judged: dict[str, dict[str, int]] = {}
    with _text(path) as file:
        for number, line in enumerate(file, start=1):
            fields = line.split()
            if not fields or (number == 1 and fields[0] in _HEADERS):
                continue
            try:
                question, passage, text = fields if len(fields) == 3 else (fields[0], *fields[2:])
                grade = int(text)
            except ValueError:
                what = f"expected `question 0 passage grade`, found {_excerpt(line)}"
                raise UserError(f"{path}:{number}: {what}") from None
            if judged.setdefault(question, {}).setdefault(passage, grade) != grade:
                raise UserError(f"{path}:{number}: an earlier line has another grade of {passage}")
    if not judged:
        raise UserError(f"{path}: expected judgements, one `question 0 passage grade` per line, found none")
    return judged


def document_records(path: Path) -> Iterator[Record]:
    """One record `{id, title, text}` per `<doc>`, as a stream. Raises UserError.

    Without `<text>` the text is all of the document.
    """
    for index, (line, document) in enumerate(_documents(path)):
        row = {name: _field(document, tag) for name, tag in _TAGS.items()}
        if not row["text"]:
            row["text"] = _all_text(document)
        yield Record(path, f":{line}", index, row)


def _documents(path: Path) -> Iterator[tuple[int, str]]:
    """The line number of each document, and its text with tags."""
    document, start = "", 0
    with _text(path) as file:
        for line, text in enumerate(file, start=1):
            for piece in _END.split(text):
                if not document and "<doc>" not in piece.lower():
                    continue
                start = start if document else line
                document += piece
                if piece.lower().endswith("</doc>"):
                    yield start, document
                    document = ""
    if document:
        raise UserError(f"{path}:{start}: expected </doc> for this <doc>, found the end of the file")


def _field(document: str, name: str) -> str:
    """What all tags of this name have, a line each."""
    return "\n".join(filter(None, map(_without_tags, _contents(document, name))))


def _all_text(document: str) -> str:
    """All but id and title, for collections whose text is under other tags (`<headline>`, `<leadpara>`)."""
    for tag in ("id", "title"):
        document = _element(_TAGS[tag]).sub(lambda match: "" if match[2] else match[0], document)
    return _without_tags(document)


def _contents(text: str, name: str) -> list[str]:
    """What stands in each `<name> … </name>`."""
    return [content for content, closed in _element(name).findall(text) if closed]


def _element(name: str) -> re.Pattern[str]:
    """From a tag to its end; without one, to the end of the text, so that no text is read twice."""
    return re.compile(rf"<{name}>(.*?)(</{name}>|\Z)", re.DOTALL | re.IGNORECASE)


def _without_tags(text: str) -> str:
    return html.unescape(_MARKUP.sub(" ", text)).strip()


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return repr(line if len(line) <= 60 else line[:60] + "…")
