"""BM25 in process: the scores of all terms in all passages are computed once, and a search sums them."""

from __future__ import annotations

import logging
import re
import shutil
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np

from srl.errors import UserError
from srl.index import PassageStore, RetrieverBase, keep_passages, open_passages
from srl.trajectory import Hit, Passage
from srl_bm25.analysis import Analyzer
from srl_bm25.kernel import top_rows
from srl_bm25.options import Options
from srl_bm25.parallel_build import processes, read_in_parts
from srl_bm25.postings import NAMES, read_documents, write_postings
from srl_bm25.vocabulary import Vocabulary

log = logging.getLogger(__name__)
MEMORY_OF_TEXT = 1.5
"""Memory of a build per byte of the corpus, without mapped files (measured by bench/lexical.py)."""


class BM25Retriever(RetrieverBase):
    """Search by words in common. Memory-mapped, deterministic, thread-safe."""

    name = "bm25"
    parallel = True  # the loop over the postings runs without the GIL

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self._analyze = Analyzer(self.options.stopwords, self.options.stemmer)

    def build(self, passages: Iterable[Passage], directory: Path, progress: Callable[[int], None]) -> None:
        """Write the index of `passages` into `directory`; `progress` gets the number analysed so far.

        The postings are built in memory; the texts are not held in memory.
        """
        store = keep_passages(passages, directory)
        _warn_of_memory(store)
        folder = directory / self.name
        if folder.is_dir():  # of a build that was killed
            shutil.rmtree(folder)
        folder.mkdir()
        count = processes(self.options, len(store))
        if count == 1:
            documents = read_documents(store, self._analyze, progress)
        else:
            documents = read_in_parts(store, self.options, folder, count, progress)
        if not documents.numbers:
            raise UserError(
                "no passage of the corpus contains a word to index", key="retriever.bm25.stopwords"
            )
        write_postings(documents, self.options.k1, self.options.b, folder)

    def open(self, directory: Path) -> BM25Retriever:
        """Memory-map the index under `directory`, and compile the search if it is not cached."""
        self._store = open_passages(directory)
        folder = directory / self.name
        self._postings = tuple(np.load(folder / f"{name}.npy", mmap_mode="r") for name in NAMES)
        self._vocabulary = Vocabulary(folder)
        self._pool = ThreadPoolExecutor(self.options.n_threads, thread_name_prefix="bm25")
        self._rank([""], 1)
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the passages.

        Passages without a term of the query are not returned.
        """
        threads = min(self.options.n_threads, len(queries))
        if threads < 2:
            ranked = [self._rank(queries, k)]
        else:
            bounds = [len(queries) * part // threads for part in range(threads + 1)]
            parts = [queries[start:end] for start, end in pairwise(bounds)]
            ranked = list(self._pool.map(self._rank, parts, [k] * threads))
        return [
            [Hit(self._store[row], score) for row, score in zip(*pair, strict=True) if row >= 0]
            for rows, scores in ranked
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def _rank(self, queries: list[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the best passages (Q, k), -1 if there are fewer, and their scores (Q, k)."""
        terms, starts = array("q"), array("q", [0])
        for query in queries:
            terms.extend(self._vocabulary.terms(self._analyze(query)))
            starts.append(len(terms))
        return top_rows(
            *self._postings, len(self._store),
            np.array(terms, np.int64), np.array(starts, np.int64), min(k, len(self._store)),
        )  # fmt: skip


def _warn_of_memory(store: PassageStore) -> None:
    """Recommend lucene if building the index needs more memory than is free."""
    size, free = MEMORY_OF_TEXT * (store.directory / "text.bin").stat().st_size, free_memory()
    if size >= free:
        log.warning(
            "building bm25 for %s passages takes about %.1f GB of memory, %.1f GB are free; lucene builds "
            "with 2 GB: srl index build --retriever lucene",
            f"{len(store):,}", size / 1e9, free / 1e9,
        )  # fmt: skip


def free_memory() -> int:
    """Memory of this machine that a process can have, in bytes; 2⁶² where that is unknown."""
    path = Path("/proc/meminfo")
    match = re.search(r"MemAvailable: +(\d+) kB", path.read_text()) if path.is_file() else None
    return int(match[1]) << 10 if match else 1 << 62
