"""The terms of an index on disk, found by their hashes. The files are memory-mapped.

hashes.npy   (terms,) uint64: 64-bit hashes of the terms, sorted
terms.npy    (terms,) int32: the number of the term of each hash
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np

from srl.errors import UserError

_REMEMBERED = 1 << 16


class Vocabulary:
    """Maps terms to their numbers. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._hashes = np.load(folder / "hashes.npy", mmap_mode="r")
        self._terms = np.load(folder / "terms.npy", mmap_mode="r")
        self._number = lru_cache(_REMEMBERED)(self._find)

    @staticmethod
    def write(numbers: Mapping[str, int], folder: Path) -> None:
        """Write the two files. Raises UserError if two terms have the same hash."""
        hashes = np.fromiter(map(_hash, numbers), np.uint64, len(numbers))
        order = np.argsort(hashes)
        if (np.diff(hashes[order]) == 0).any():
            raise UserError("two words of the corpus have the same hash; try another stemmer")
        np.save(folder / "hashes.npy", hashes[order])
        np.save(folder / "terms.npy", np.fromiter(numbers.values(), np.int32, len(numbers))[order])

    def terms(self, words: Iterable[str]) -> Iterator[int]:
        """The numbers of the words that are in the index, in their order."""
        return (number for number in map(self._number, words) if number >= 0)

    def _find(self, word: str) -> int:
        key = np.uint64(_hash(word))
        place = int(self._hashes.searchsorted(key))
        return int(self._terms[place]) if place < len(self._hashes) and self._hashes[place] == key else -1


def _hash(word: str) -> int:
    data = word.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
