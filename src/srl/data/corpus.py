"""Corpora: one passage per row, or per file of a folder, read and written as a stream."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import blake2b
from html import unescape
from pathlib import Path
from typing import Literal

from srl.data.published_rows import Record, open_text, read_rows, suffix_of
from srl.data.trec import document_records, is_tagged
from srl.errors import UserError
from srl.files import atomic_file, digest_file, digest_text
from srl.trajectory import Passage, contents_of

_log = logging.getLogger(__name__)
_TEXTS = (".txt", ".md")
_TABLES = (".csv", ".tsv", ".parquet", ".jsonl")
"""The files that are read in a folder: a text is a passage, and so is each row of a table."""
_LONGEST_TITLE = 120
_IDS = ("id", "_id", "docid")


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


def title_key(title: str) -> str:
    """A title as it is compared: without outer quotation marks, HTML entities, underscores, extra spaces."""
    return " ".join(unescape(title).replace("_", " ").split()).strip('"')


def read_corpus(path: Path | str, skipped: Counter[str] | None = None, source: str = "") -> Iterator[Passage]:
    """The passages of a corpus, in order: rows (`read_rows`), TREC's documents, or those of a folder.

    A row is `{"id", "contents"}`, or `{"title", "text"}` with or without an id; a `url` is kept. A row
    without an id gets one derived from its contents, after the name of the `source`, and its repeats are
    skipped. Rows without a text and a folder's other files are left out, and counted in `skipped` or
    logged. Raises UserError with file and line for any other row and for a repeated id, and UserError for a
    file without passages.
    """
    path, ids, count, left_out = Path(path), PassageIds(), 0, Counter[str]()
    for record in _records(path, left_out):
        if _is_empty(record):
            left_out["no text"] += 1
            continue
        passage = _passage(record, source)
        if (state := ids.add(passage)) != "new":
            if state == "same" and not record.has(*_IDS):
                continue
            raise record.error("an id that no earlier passage has", repr(passage.id))
        count += 1
        yield passage
    if not count:
        where = f"in {', '.join(_TEXTS + _TABLES)} files" if path.is_dir() else "per line"
        raise UserError(f'{path}: expected passages, one {{"id", "contents"}} {where}, found none')
    if skipped is not None:
        skipped.update(left_out)
        return
    for why, number in left_out.items():
        _log.warning("%s: %s left out: %s", path, f"{number:,}", why)


def _is_empty(record: Record) -> bool:
    """Whether the row has the fields of a passage, and no text in them."""
    texts = [record.row[name] for name in ("contents", "title", "text") if name in record.row]
    return bool(texts) and all(text is None or (isinstance(text, str) and not text.strip()) for text in texts)


def digest_corpus(path: Path) -> str:
    """A digest of the file, or of the names and the bytes of the files that are read in a folder."""
    if not path.is_dir():
        return digest_file(path)
    names = [name for name in _files(path) if suffix_of(name) in _TEXTS + _TABLES]
    return digest_text(*map(str, names), *(digest_file(path / name) for name in names))


def _files(folder: Path) -> list[Path]:
    """The files of a folder and the folders in it, by name; none that is hidden."""
    names = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if not any(part.startswith(".") for part in name.parts))


def _in_folder(folder: Path, left_out: Counter[str]) -> Iterator[Record]:
    """The texts and the rows of a folder; other files are counted in `left_out`."""
    for index, name in enumerate(_files(folder)):
        if suffix_of(name) in _TABLES:
            yield from read_rows(folder / name)
        elif suffix_of(name) in _TEXTS:
            yield _text_record(folder, name, index)
        else:
            left_out[f"{suffix_of(name) or 'other'} files are not read"] += 1


def _text_record(folder: Path, name: Path, index: int) -> Record:
    """The record `{id, title, text}` of a text: its path, and its first line where that is short.

    The title is else the name of the file.
    """
    try:
        with open_text(folder / name) as file:
            text = file.read().strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{folder / name}: expected text in UTF-8, found {error.reason}") from error
    first, _, body = text.partition("\n")
    title = first.strip("# \t*=_")
    if not body.strip() or len(first) > _LONGEST_TITLE or not re.search(r"\w", title):
        title, body = name.stem, text
    row = {"id": name.as_posix(), "title": title if text else "", "text": body}
    return Record(folder / name, "", index, row)


def _records(path: Path, left_out: Counter[str]) -> Iterator[Record]:
    """The rows of a corpus; an empty document of TREC's is kept, so that its id is known."""
    if path.is_dir():
        yield from _in_folder(path, left_out)
        return
    if not is_tagged(path):
        yield from read_rows(path)
        return
    for record in document_records(path):
        contents = contents_of(" ".join(record.row["title"].split()), record.row["text"])
        yield replace(record, row={"id": record.text("id"), "contents": contents})


def _passage(record: Record, source: str) -> Passage:
    """The passage in one row; `source` is the prefix of an id derived from contents."""
    url = record.row.get("url")
    url = record.valid(url, "url").strip() if isinstance(url, str) else ""
    if "contents" in record.row:
        return Passage(record.exact(*_IDS), record.exact("contents"), url)
    title = record.valid(record.row.get("title") or "", "title")
    text = record.valid(record.row.get("text") or "", "text")
    if not (title.strip() or text.strip()):
        raise record.error("'contents', or 'title' and 'text'", ", ".join(map(str, record.row)) or "no field")
    if record.has(*_IDS):
        return Passage(record.exact(*_IDS), contents_of(" ".join(title.split()), text), url)
    return replace(passage_of(title, text, source), url=url)


def write_corpus(
    path: Path | str,
    passages: Iterable[Passage],
    written: Callable[[Passage], Sequence[Passage]] = lambda passage: (passage,),
) -> int:
    """Write `{"id", "contents"}` lines atomically, with a `url` where there is one, and return their number.

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
                file.writelines(json.dumps(part.row(), ensure_ascii=False) + "\n" for part in parts)
                count += len(parts)
        if not count:
            raise UserError(f"{path} was not written: there are no passages")
    return count
