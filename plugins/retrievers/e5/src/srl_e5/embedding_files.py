"""Embeddings on disk, one file per range of rows. Finished files survive a crash."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from srl.files import atomic_file

_NAME = re.compile(r"(\d{12})-(\d{12})\.npy")


class Shards:
    """Vectors (N, D) float32 of consecutive rows, in files `<first>-<end>.npy`, written atomically."""

    def __init__(self, directory: Path, dimension: int) -> None:
        self.directory = directory
        self._dimension = dimension

    def save(self, first: int, vectors: np.ndarray) -> None:
        """Write the vectors of the rows from `first` on, and flush them to disk."""
        with atomic_file(self.directory / f"{first:012d}-{first + len(vectors):012d}.npy", "wb") as file:
            np.save(file, vectors)

    def end(self, row: int) -> int:
        """The end (exclusive) of the rows from `row` on that are saved without a gap."""
        files = {first: (end, path) for first, end, path in self._files()}
        while row in files and self._is_whole(files[row][1], files[row][0] - row):
            row = files[row][0]
        return row

    def first(self) -> int | None:
        """The first row of all files; None if there are no files."""
        return min((first for first, _, _ in self._files()), default=None)

    def chunks(self, row: int) -> Iterator[tuple[int, Path, np.ndarray]]:
        """(first row, file, memory-mapped vectors) of the files from `row` on, up to the first gap."""
        for first, end, path in sorted(self._files()):
            if first == row:
                yield first, path, np.load(path, mmap_mode="r")
                row = end

    def rows(self, wanted: np.ndarray) -> np.ndarray:
        """The vectors of the sorted rows `wanted`, (len(wanted), D) float32. All rows must be saved."""
        parts = [
            vectors[wanted[(wanted >= first) & (wanted < first + len(vectors))] - first]
            for first, _, vectors in self.chunks(0)
        ]
        return np.concatenate(parts)

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _files(self) -> list[tuple[int, int, Path]]:
        if not self.directory.is_dir():
            return []
        named = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return [(int(match[1]), int(match[2]), path) for match, path in named if match]

    def _is_whole(self, path: Path, rows: int) -> bool:
        """Whether the file holds `rows` vectors; a truncated file is computed again."""
        try:
            found = np.load(path, mmap_mode="r")
        except (ValueError, OSError, EOFError):
            return False
        return found.shape == (rows, self._dimension) and found.dtype == np.float32
