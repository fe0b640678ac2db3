"""The passages of an index on disk: memory-mapped, found by row, by id or by web address.

Opening maps four files, six with web addresses, and reads none, so even millions of passages take no memory
until they are read. The files of a store, in one directory:

    text.bin      of every passage its id, its contents and further fields as JSON, one after the other, UTF-8
    offsets.npy   (3n + 1,) uint64: where in text.bin each of these starts
    hashes.npy    (n,) uint64: 64-bit hashes of the ids, sorted
    rows.npy      (n,) int64: the row that each of those hashes belongs to

Where passages have a web address, also `url-hashes.npy` and `url-rows.npy` (m,) of the m that have one.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np

from srl.errors import UserError
from srl.trajectory import Passage

FOLDER = "passages"
_ENCODING = ("utf-8", "surrogatepass")
_URLS = "url-"
"""Begins the names of the files of web addresses."""


def _fields(passage: Passage) -> tuple[bytes, bytes, bytes]:
    """The id, the contents and the other fields of a passage, which few have."""
    row = passage.row()
    texts = (row.pop("id"), row.pop("contents"), json.dumps(row, sort_keys=True) if row else "")
    return tuple(text.encode(*_ENCODING) for text in texts)  # type: ignore[return-value]


class PassageStore(Sequence[Passage]):
    """The passages under `directory`, in the order of the corpus. Safe to read from many threads."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._offsets = self._load("offsets.npy")  # (3n + 1,)
        self._bounds = memoryview(self._offsets)  # type: ignore[arg-type]  # slices faster than an array
        self._hashes, self._rows = self._load("hashes.npy"), self._load("rows.npy")  # both (n,)
        with open(self.directory / "text.bin", "rb") as file:
            self._text = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._url_hashes, self._url_rows = np.empty(0, np.uint64), np.empty(0, np.int64)
        if (self.directory / f"{_URLS}rows.npy").exists():
            self._url_hashes, self._url_rows = (
                self._load(f"{_URLS}{name}.npy") for name in ("hashes", "rows")
            )

    def _load(self, name: str) -> np.ndarray:
        return np.load(self.directory / name, mmap_mode="r", allow_pickle=False)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The memory-mapped offsets (3n + 1,), id hashes (n,) and rows (n,)."""
        return self._offsets, self._hashes, self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Passage:  # type: ignore[override]
        """The passage at `row` (from 0; negative from the end). Raises IndexError."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        row %= len(self)
        start, middle, end, last = self._bounds[3 * row : 3 * row + 4].tolist()
        parts = self._text[start:middle], self._text[middle:end]
        name, contents = (part.decode(*_ENCODING) for part in parts)
        if end == last:
            return Passage(name, contents)
        return Passage.of({"id": name, "contents": contents, **json.loads(self._text[end:last])})

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def row(self, passage_id: str) -> int | None:
        """The row of the passage with this id, or None."""
        return _find(passage_id, self._hashes, self._rows, lambda row: self[row].id)

    def passage(self, name: str) -> Passage:
        """The passage with this id, or else the first one with this web address. Raises KeyError."""
        row = self.row(name)
        if row is None:
            row = _find(name, self._url_hashes, self._url_rows, lambda row: self[row].url)
        if row is None:
            raise KeyError(name)
        return self[row]


def _find(name: str, hashes: np.ndarray, rows: np.ndarray, name_of: Callable[[int], str]) -> int | None:
    """The first of the `rows` whose name is `name`; `hashes` are those of their names, sorted."""
    key = np.uint64(_hash(name))
    position = int(hashes.searchsorted(key))
    while position < len(hashes) and hashes[position] == key:
        row = int(rows[position])
        if name_of(row) == name:
            return row
        position += 1
    return None


def keep_passages(
    passages: Iterable[Passage], directory: Path, progress: Callable[[int], None] | None = None
) -> PassageStore:
    """The store of `passages` under `directory`, written unless they come from that store.

    A retriever's `build` calls this first. Inside `srl index build` the passages are already stored; a
    retriever used alone stores them itself. `progress` is called with the number of passages stored so far.
    """
    folder = Path(directory) / FOLDER
    if isinstance(passages, PassageStore) and passages.directory == folder:
        return passages
    return write_passages(passages, folder, progress)


def open_passages(directory: Path | str) -> PassageStore:
    """The passages that `keep_passages` stored in the index at `directory`, memory-mapped."""
    return PassageStore(Path(directory) / FOLDER)


def write_passages(
    passages: Iterable[Passage], directory: Path, progress: Callable[[int], None] | None = None
) -> PassageStore:
    """Write a store in one pass, and open it.

    Raises UserError for two passages with one id, and for an empty corpus.
    """
    directory.mkdir(parents=True, exist_ok=True)
    offsets, hashes = array("Q", [0]), array("Q")
    url_hashes, url_rows = array("Q"), array("q")
    with open(directory / "text.bin", "wb") as file:
        for count, passage in enumerate(passages, start=1):
            for text in _fields(passage):
                offsets.append(offsets[-1] + file.write(text))
            hashes.append(_hash(passage.id))
            if passage.url:
                url_hashes.append(_hash(passage.url))
                url_rows.append(count - 1)
            if progress:
                progress(count)
    if not hashes:
        raise UserError("the corpus has no passages; an index needs at least one")
    for name in directory.glob(f"{_URLS}*"):  # of an earlier attempt
        name.unlink()
    np.save(directory / "offsets.npy", np.frombuffer(offsets, np.uint64))
    _save(directory, "", hashes, np.arange(len(hashes)))
    if url_rows:
        _save(directory, _URLS, url_hashes, np.frombuffer(url_rows, np.int64))
    store = PassageStore(directory)
    _refuse_duplicates(store)
    return store


def _save(directory: Path, prefix: str, hashes: array[int], rows: np.ndarray) -> None:
    """Write the hashes of the names sorted, with the row of each; equal ones in their order."""
    order = np.argsort(np.frombuffer(hashes, np.uint64), kind="stable")
    np.save(directory / f"{prefix}hashes.npy", np.frombuffer(hashes, np.uint64)[order])
    np.save(directory / f"{prefix}rows.npy", rows[order].astype(np.int64))


def _refuse_duplicates(store: PassageStore) -> None:
    _, hashes, rows = store.arrays
    for position in (np.flatnonzero(hashes[1:] == hashes[:-1]) + 1).tolist():
        row = int(rows[position])
        first = store.row(store[row].id)
        if first is not None and first != row:
            raise UserError(f"passages {first + 1} and {row + 1} have the same id, {store[row].id!r}")


def _hash(passage_id: str) -> int:
    return int.from_bytes(blake2b(passage_id.encode(*_ENCODING), digest_size=8).digest(), "little")


def _length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little")


_NO_LENGTH = b"\xff" * 8
"""Stands before and after the further fields, which few passages have."""


class CorpusDigest:
    """Streaming digest (blake2b-128) of passages: ids, contents, further fields and order.

    It does not depend on the file format: a corpus has the same digest in every format.
    """

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16)

    def of(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        """Pass the passages through; after the last one, `hexdigest` is their digest."""
        update = self._digest.update
        for passage in passages:
            name, contents, more = _fields(passage)
            update(b"".join((_length(name), name, _length(contents), contents)))
            if more:
                update(b"".join((_NO_LENGTH, more, _NO_LENGTH)))
            yield passage

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
