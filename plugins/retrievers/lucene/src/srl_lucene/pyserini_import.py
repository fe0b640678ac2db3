"""Imports indexes built by pyserini: reads their passages, and maps documents to passages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from srl.errors import UserError
from srl.files import link_or_copy
from srl.index.passages import PassageStore
from srl.trajectory import Passage
from srl_lucene import java, lucene

ROWS = "rows.npy"
_MARK = "segments_*"


def passages_in(source: Path) -> Iterator[Passage]:
    """The passages of the index at `source`, in Lucene's order. Raises UserError if it stores no texts."""
    folder = index_folder(source)
    reader = lucene.reader(folder)
    stored = reader.storedFields()
    for number in _live(reader):
        document = stored.document(number)
        yield Passage(_id_of(document, folder), _contents(document, folder))


def adopt(source: Path, store: PassageStore, folder: Path, progress: Callable[[int], None]) -> None:
    """Link or copy the index at `source` to `folder`, and save the row in `store` of each document.

    Raises UserError unless the index and the store contain the same passages.
    """
    found = index_folder(source)
    rows = _rows_of(lucene.reader(found), store, found, progress)
    for path in sorted(found.iterdir()):
        if path.is_file() and path.name != "write.lock":
            link_or_copy(path, folder / path.name)
    if not np.array_equal(rows, np.arange(len(store))):
        np.save(folder / ROWS, rows)


def read_rows(folder: Path) -> np.ndarray | None:
    """The row of each document (documents,), -1 for a deleted one; None if all are the document numbers."""
    path = folder / ROWS
    return np.load(path, mmap_mode="r", allow_pickle=False) if path.is_file() else None


def index_folder(source: Path) -> Path:
    """`source` or the first directory in it that contains a Lucene index. Raises UserError without one."""
    folders = [source, *sorted(path for path in source.glob("*") if path.is_dir())]
    found = [folder for folder in folders if any(folder.glob(_MARK))]
    if not found:
        raise UserError(f"{source}: expected a Lucene index (a directory with a file {_MARK}), found none")
    return found[0]


def _rows_of(reader: Any, store: PassageStore, folder: Path, progress: Callable[[int], None]) -> np.ndarray:
    """The row in `store` of each document (documents,), -1 for a deleted one."""
    if reader.numDocs() != len(store):
        raise UserError(
            f"{folder} has {reader.numDocs():,} passages, the corpus {len(store):,}; "
            "give the corpus that it was built from"
        )
    rows = np.full(reader.maxDoc(), -1, np.int64)
    for done, (number, name) in enumerate(_names(reader, folder), start=1):
        row = store.row(name)
        if row is None:
            raise UserError(
                f"{folder} has a passage {name!r} that the corpus lacks; "
                "give the corpus that it was built from"
            )
        rows[number] = row
        progress(done)
    return rows


def _names(reader: Any, folder: Path) -> Iterator[tuple[int, str]]:
    """The number and the id of every document."""
    stored = reader.storedFields()
    return ((number, _id_of(stored.document(number), folder)) for number in _live(reader))


def _id_of(document: Any, folder: Path) -> str:
    found = document.get("id")
    if found is None:
        raise UserError(
            f"{folder} stores no passage ids, unlike the indexes of pyserini; "
            "type: srl index build --retriever lucene --corpus FILE"
        )
    return str(found)


def _live(reader: Any) -> Iterator[int]:
    """The numbers of all documents that are not deleted."""
    live = java.java_class("org.apache.lucene.index.MultiBits").getLiveDocs(reader)
    return (number for number in range(reader.maxDoc()) if live is None or live.get(number))


def _contents(document: Any, folder: Path) -> str:
    """The contents of a passage, from its stored JSON (`--storeRaw`) or text (`--storeContents`)."""
    raw, contents = document.get("raw"), document.get(lucene.CONTENTS)
    if raw is not None:
        try:
            contents = json.loads(raw)["contents"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f'{folder}: passage {document.get("id")!r} is not stored as {{"contents": …}}; '
                "add --corpus FILE, the corpus that it was built from"
            ) from error
    if not isinstance(contents, str):
        raise UserError(
            f"{folder} was built without --storeRaw and contains no texts; "
            "add --corpus FILE, the corpus that it was built from"
        )
    return contents
