"""The passages of an index on disk: memory-mapped, found by row or by id.

Opening maps four files and reads none, so even millions of passages take no memory until they are read.
The files of a store, in one directory:

    text.bin      id and contents of every passage, one after the other, UTF-8
    offsets.npy   (2n + 1,) uint64: where in text.bin each id and each contents starts
    hashes.npy    (n,) uint64: 64-bit hashes of the ids, sorted
    rows.npy      (n,) int64: the row that each of those hashes belongs to
"""

from __future__ import annotations

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


class PassageStore(Sequence[Passage]):
    """The passages under `directory`, in the order of the corpus. Safe to read from many threads."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._offsets = self._load("offsets.npy")  # (2n + 1,)
        self._bounds = memoryview(self._offsets)  # type: ignore[arg-type]  # slices faster than an array
        self._hashes = self._load("hashes.npy")  # (n,)
        self._rows = self._load("rows.npy")  # (n,)
        with open(self._file("text.bin"), "rb") as file:
            self._text = mmap(file.fileno(), 0, access=ACCESS_READ)
        sizes = (2 * len(self._rows) + 1, len(self._hashes), int(self._offsets[-1]))
        if sizes != (len(self._offsets), len(self._rows), len(self._text)):
            raise UserError(f"{self.directory}: its files do not match each other; build the index again")

    def _file(self, name: str) -> Path:
        path = self.directory / name
        if not path.is_file() or not path.stat().st_size:
            raise UserError(f"{path} is missing or empty: the passage store is incomplete")
        return path

    def _load(self, name: str) -> np.ndarray:
        path = self._file(name)
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise UserError(f"{path}: truncated or not a numpy file ({error})") from error

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The memory-mapped offsets (2n + 1,), id hashes (n,) and rows (n,)."""
        return self._offsets, self._hashes, self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Passage:  # type: ignore[override]
        """The passage at `row` (from 0; negative from the end). Raises IndexError."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)} passages")
        first = 2 * (row % len(self))
        start, middle, end = self._bounds[first : first + 3].tolist()
        return Passage(self._text[start:middle].decode(*_ENCODING), self._text[middle:end].decode(*_ENCODING))

    def __iter__(self) -> Iterator[Passage]:
        return (self[row] for row in range(len(self)))

    def row(self, passage_id: str) -> int | None:
        """The row of the passage with this id, or None."""
        key = np.uint64(_hash(passage_id))
        position = int(self._hashes.searchsorted(key))
        while position < len(self) and self._hashes[position] == key:
            row = int(self._rows[position])
            if self[row].id == passage_id:
                return row
            position += 1
        return None

    def passage(self, passage_id: str) -> Passage:
        """The passage with this id. Raises KeyError if the id is unknown."""
        row = self.row(passage_id)
        if row is None:
            raise KeyError(passage_id)
        return self[row]


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
    with open(directory / "text.bin", "wb") as file:
        for count, passage in enumerate(passages, start=1):
            for text in (passage.id, passage.contents):
                offsets.append(offsets[-1] + file.write(text.encode(*_ENCODING)))
            hashes.append(_hash(passage.id))
            if progress:
                progress(count)
    if not hashes:
        raise UserError("the corpus has no passages; an index needs at least one")
    _write_arrays(directory, np.frombuffer(offsets, np.uint64), np.frombuffer(hashes, np.uint64))
    store = PassageStore(directory)
    _refuse_duplicates(store)
    return store


def _write_arrays(directory: Path, offsets: np.ndarray, hashes: np.ndarray) -> None:
    order = np.argsort(hashes, kind="stable")
    np.save(directory / "offsets.npy", offsets)
    np.save(directory / "hashes.npy", hashes[order])
    np.save(directory / "rows.npy", order.astype(np.int64))


def _refuse_duplicates(store: PassageStore) -> None:
    _, hashes, rows = store.arrays
    for position in (np.flatnonzero(hashes[1:] == hashes[:-1]) + 1).tolist():
        row = int(rows[position])
        first = store.row(store[row].id)
        if first is not None and first != row:
            raise UserError(
                f"passages {first + 1} and {row + 1} have the same id, {store[row].id!r}; ids must be unique"
            )


def _hash(passage_id: str) -> int:
    return int.from_bytes(blake2b(passage_id.encode(*_ENCODING), digest_size=8).digest(), "little")


def _length(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little")


class CorpusDigest:
    """Streaming digest (blake2b-128) of passages: ids, contents and order.

    It does not depend on the file format: a corpus has the same digest in every format.
    """

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16)

    def of(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        """Pass the passages through; after the last one, `hexdigest` is their digest."""
        update = self._digest.update
        for passage in passages:
            name, contents = passage.id.encode(*_ENCODING), passage.contents.encode(*_ENCODING)
            update(b"".join((_length(name), name, _length(contents), contents)))
            yield passage

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
