"""Embeds a corpus into one file that grows, so that a build that was killed goes on where it was."""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import numpy as np

from srl.index import PassageStore
from srl_e5.encoder import Encoder

SHARD = 4096
"""Passages embedded and saved at a time. A killed build loses at most these."""


class Embeddings:
    """Vectors (N, D) float32 of the first N passages, one after the other in a file."""

    def __init__(self, path: Path, dimension: int) -> None:
        self._path, self._dimension = path, dimension

    def __len__(self) -> int:
        """The number of whole vectors in the file."""
        return self._path.stat().st_size // (4 * self._dimension) if self._path.is_file() else 0

    def append(self, vectors: np.ndarray) -> None:
        """Write `vectors` (n, D) after the whole ones, and flush them to disk."""
        end = len(self) * 4 * self._dimension
        with open(self._path, "r+b" if self._path.exists() else "wb") as file:
            file.truncate(file.seek(end))
            file.write(np.ascontiguousarray(vectors, np.float32).data)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> np.ndarray:
        """All vectors (N, D), memory-mapped."""
        return np.memmap(self._path, np.float32, "r", shape=(len(self), self._dimension))


def embed(
    store: PassageStore,
    embeddings: Embeddings,
    load: Callable[[], Encoder],
    progress: Callable[[int], None],
) -> None:
    """Append the vectors of the passages that `embeddings` lacks; `load` gives the encoder.

    Passages with equal texts get equal vectors: only the first of them is embedded. `progress` first gets the
    number of passages embedded already, then a count that grows with the embedded tokens.
    """
    row = len(embeddings)
    progress(row)
    if row == len(store):
        return
    encoder, first = load(), _first_with_the_same_text(store)
    while row < len(store):
        here = first[row : row + SHARD]
        new, size = np.flatnonzero(here >= row), len(here)
        report = lambda share, row=row, size=size: progress(row + int(share * size))  # noqa: E731
        vectors = np.empty((size, encoder.dimension), np.float32)
        vectors[new] = encoder.passages([store[row + place].contents for place in new.tolist()], report)
        before = np.flatnonzero(here < row)
        if len(before):
            vectors[before] = embeddings.read()[here[before]]
        embeddings.append(vectors)
        row += size


def _first_with_the_same_text(store: PassageStore) -> np.ndarray:
    """For each passage the row of the first one with its text, (N,) int64. Texts are compared by 64 bits."""
    hashes = np.fromiter(map(_hash, store), np.uint64, len(store))
    _, first, same = np.unique(hashes, return_index=True, return_inverse=True)
    return first[same]


def _hash(passage: object) -> int:
    text = passage.contents.encode("utf-8", "surrogatepass")  # type: ignore[attr-defined]
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
