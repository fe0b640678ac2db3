"""Imports indexes built by pyserini: reads their passages, and maps documents to passages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from srl.errors import UserError
from srl.files import link_or_copy
from srl.index import PassageStore
from srl.trajectory import Passage
from srl_lucene import java, lucene

ROWS = "rows.npy"
_MARK = "segments_*"
_GIVE_CORPUS = "give --corpus FILE, the corpus that it was built from"


def passages_in(source: Path) -> Iterator[Passage]:
    """The passages of the index at `source`, in Lucene's order. Raises UserError if it stores no texts."""
    folder = index_folder(source)
    for _, document in _documents(lucene.reader(folder)):
        yield Passage(_id_of(document, folder), _contents(document, folder))


def adopt(source: Path, store: PassageStore, folder: Path, progress: Callable[[int], None]) -> None:
    """Link or copy the index at `source` to `folder`, and save the row in `store` of each document.

    Raises UserError unless the index and the store contain the same passages.
    """
    index = index_folder(source)
    reader = lucene.reader(index)
    if reader.numDocs() != len(store):
        raise UserError(
            f"{index} has {reader.numDocs():,} passages, the corpus {len(store):,}", hint=_GIVE_CORPUS
        )
    rows = np.full(reader.maxDoc(), -1, np.int64)
    for count, (number, document) in enumerate(_documents(reader), start=1):
        name = _id_of(document, index)
        row = store.row(name)
        if row is None:
            raise UserError(f"{index} has a passage {name!r} that the corpus lacks", hint=_GIVE_CORPUS)
        rows[number] = row
        progress(count)
    for path in sorted(index.iterdir()):
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
    for folder in (source, *sorted(path for path in source.glob("*") if path.is_dir())):
        if any(folder.glob(_MARK)):
            return folder
    raise UserError(f"{source}: expected a Lucene index (a directory with a file {_MARK})")


def _documents(reader: Any) -> Iterator[tuple[int, Any]]:
    """The number and the stored fields of every document that is not deleted."""
    live = java.java_class("org.apache.lucene.index.MultiBits").getLiveDocs(reader)
    stored = reader.storedFields()
    for number in range(reader.maxDoc()):
        if live is None or live.get(number):
            yield number, stored.document(number)


def _id_of(document: Any, folder: Path) -> str:
    name = document.get("id")
    if name is None:
        raise UserError(f"{folder} stores no passage ids, unlike the indexes of pyserini")
    return str(name)


def _contents(document: Any, folder: Path) -> str:
    """The contents of a passage, from its stored JSON (`--storeRaw`) or text (`--storeContents`)."""
    raw, contents = document.get("raw"), document.get(lucene.CONTENTS)
    if raw is not None:
        try:
            contents = json.loads(raw)["contents"]
        except (ValueError, KeyError, TypeError):
            contents = None
    if not isinstance(contents, str):
        name = document.get("id")
        raise UserError(f"{folder} does not store the text of passage {name!r}", hint=_GIVE_CORPUS)
    return contents
