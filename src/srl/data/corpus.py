"""Corpora: one passage per line, read and written as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from html import unescape
from pathlib import Path
from typing import Literal

from srl.data.published_rows import Record, read_rows
from srl.data.trec import document_records, is_tagged
from srl.errors import UserError
from srl.files import atomic_file
from srl.trajectory import Passage


class PassageIds:
    """The ids seen so far. Numbers that count up (`0, 1, 2, …` or `1, 2, 3, …`) take no memory, other ids
    about 150 bytes each."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._next = 0
        self._others: dict[str, int] = {}

    def add(self, passage: Passage) -> Literal["new", "same", "clash"]:
        """Whether the id is new, a repeat with the same contents (up to white space), or a clash."""
        if passage.id in self._others:
            return "same" if self._others[passage.id] == _fingerprint(passage) else "clash"
        number = _number(passage.id)
        if number is not None and self._first is None:
            self._first = self._next = number
        if number is not None and number == self._next:
            self._next += 1
        elif number is not None and self._first is not None and self._first <= number < self._next:
            return "clash"
        else:
            self._others[passage.id] = _fingerprint(passage)
        return "new"


def _number(name: str) -> int | None:
    """The number that an id is, as it would be written."""
    if len(name) >= 16 or not (name.isascii() and name.isdecimal()):
        return None
    return int(name) if name == str(int(name)) else None


def _fingerprint(passage: Passage) -> int:
    return hash(" ".join(passage.contents.split()))


def passage_of(title: str, text: str, source: str = "") -> Passage:
    """A passage whose id is derived from its contents, and so is the same in every file."""
    heading = " ".join(title.split())
    digest = blake2b(f"{heading}\0{' '.join(text.split())}".encode(), digest_size=5).hexdigest()
    name = re.sub(r"\W+", "_", heading).strip("_")[:60]
    return Passage(id=f"{source}/{name}-{digest}".lstrip("/"), contents=contents_of(heading, text))


def contents_of(title: str, text: str) -> str:
    """The passage's contents: `"Title"` on the first line, then the text."""
    return f'"{title}"\n{text.strip()}'


def title_key(title: str) -> str:
    """A title as it is compared: without outer quotation marks, HTML entities, underscores, extra spaces."""
    return " ".join(unescape(title).replace("_", " ").split()).strip('"')


def read_corpus(path: Path | str) -> Iterator[Passage]:
    """The passages of a corpus file, in order: JSON lines, a JSON array or TREC's documents, `.gz` too.

    A row is `{"id", "contents"}`, or `{"title", "text"}` with or without an id. A row without an id gets one
    derived from its contents, and its repeats are skipped. Raises UserError with file and line for any other
    row and for a repeated id, and UserError for a file without passages.
    """
    path, ids, count = Path(path), PassageIds(), 0
    for record in _records(path):
        passage = parse_passage(record)
        if (state := ids.add(passage)) != "new":
            if state == "same" and not _has_id(record):
                continue
            raise record.error("an id that no earlier passage has", repr(passage.id))
        count += 1
        yield passage
    if not count:
        raise UserError(f'{path}: expected passages, one {{"id", "contents"}} per line, found none')


def _records(path: Path) -> Iterator[Record]:
    """The rows of a corpus file; an empty document of TREC's is kept, so that its id is known."""
    if not is_tagged(path):
        yield from read_rows(path)
        return
    for record in document_records(path):
        contents = contents_of(" ".join(record.row["title"].split()), record.row["text"])
        yield replace(record, row={"id": record.text("id"), "contents": contents})


def parse_passage(record: Record, source: str = "") -> Passage:
    """The passage in one row of a corpus file; `source` is the prefix of an id derived from contents."""
    if "contents" in record.row:
        return Passage(id=record.exact("id", "_id", "docid"), contents=record.exact("contents"))
    title = record.valid(record.row.get("title") or "", "title")
    text = record.valid(record.row.get("text") or "", "text")
    if not (title.strip() or text.strip()):
        raise record.error("'contents', or 'title' and 'text'", ", ".join(map(str, record.row)) or "no field")
    if _has_id(record):
        return Passage(
            id=record.exact("id", "_id", "docid"), contents=contents_of(" ".join(title.split()), text)
        )
    return passage_of(title, text, source)


def _has_id(record: Record) -> bool:
    return any(record.row.get(name) is not None for name in ("id", "_id", "docid"))


def write_corpus(
    path: Path | str,
    passages: Iterable[Passage],
    written: Callable[[Passage], Sequence[Passage]] = lambda passage: (passage,),
) -> int:
    """Write `{"id", "contents"}` lines atomically, and return their number.

    `written` gives what is written of a passage: itself, its parts, or nothing. A repeated passage (same id
    and contents) is written once. Raises UserError for two passages with the same id, and for no passages.
    """
    ids, count = PassageIds(), 0
    with atomic_file(path) as file:
        for passage in passages:
            state, parts = ids.add(passage), written(passage)
            if not parts:
                continue
            twice = [passage.id] if state == "clash" else []
            if state == "new" and len(parts) > 1:
                twice = [part.id for part in parts if ids.add(part) != "new"]
            if twice:
                raise UserError(
                    f"{path} was not written: two passages have the id {twice[0]!r}; ids must be unique"
                )
            if state == "new":
                for part in parts:
                    row = {"id": part.id, "contents": part.contents}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                count += len(parts)
        if not count:
            raise UserError(f"{path} was not written: there are no passages")
    return count
