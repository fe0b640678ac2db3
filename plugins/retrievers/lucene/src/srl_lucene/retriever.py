"""BM25 (Robertson and Zaragoza 2009) with Lucene, configured like pyserini.

Lucene skips passages that cannot be among the best, so its time grows more slowly than the corpus. Its
index is memory-mapped. It stores the length of a passage in one byte, so lengths above 40 are rounded;
`bm25` uses exact lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

from srl.errors import UserError
from srl.index import PassageStore, RetrieverBase, keep_passages, open_passages
from srl.trajectory import Hit, Passage
from srl_lucene import java, lucene, pyserini_import
from srl_lucene.options import Options


class LuceneRetriever(RetrieverBase):
    """Search by words in common, with Lucene. Thread-safe, but unusable after a fork."""

    name = "lucene"

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def build(self, passages: Iterable[Passage], directory: Path, progress: Callable[[int], None]) -> None:
        """Write the index of `passages` into `directory`; `progress` gets the number analysed so far."""
        java.start(self.options.heap)
        lucene.write_index(keep_passages(passages, directory), directory / self.name, self.options, progress)

    def passages_in(self, source: Path) -> Iterator[Passage]:
        """The passages stored in a Lucene index that pyserini built with `--storeRaw`, in its order."""
        java.start(self.options.heap)
        return pyserini_import.passages_in(source)

    def adopt(
        self, source: Path, store: PassageStore, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Import the index that pyserini built at `source` from the passages of `store`."""
        java.start(self.options.heap)
        pyserini_import.adopt(source, store, directory / self.name, progress)

    def open(self, directory: Path) -> LuceneRetriever:
        """Start Java if necessary, and memory-map the index under `directory`."""
        java.start(self.options.heap)
        self._store = open_passages(directory)
        self._rows = pyserini_import.read_rows(directory / self.name)
        with java.lock:
            reader = lucene.reader(directory / self.name)
            if reader.maxDoc() != len(self._store if self._rows is None else self._rows):
                raise UserError(f"{directory / self.name} is not the index of these passages")
            self._searcher = lucene.searcher(reader, self.options)
            self._analyzer = lucene.analyzer(self.options)
            self._generator = java.java_class("io.anserini.search.query.BagOfWordsQueryGenerator")()
        self._answer([""], 1)
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the passages.

        Passages without a term of the query are not returned.
        """
        java.check_process()
        threads = min(self.options.n_threads, len(queries))
        if threads < 2:
            return self._answer(queries, k)
        bounds = [len(queries) * part // threads for part in range(threads + 1)]
        parts = [queries[start:end] for start, end in pairwise(bounds)]
        with ThreadPoolExecutor(threads) as pool:
            return [hits for part in pool.map(self._answer, parts, [k] * threads) for hits in part]

    def _answer(self, queries: list[str], k: int) -> list[list[Hit]]:
        most = min(k, len(self._store))
        try:
            return [
                [Hit(self._store[row], score) for row, score in self._ranked(query, most)]
                for query in queries
            ]
        finally:
            java.detach()

    def _ranked(self, query: str, k: int) -> list[tuple[int, float]]:
        """Rows and scores. Lucene returns equal scores in the order of its documents. If that is not the
        order of the passages, all documents that tie with the last one are requested and sorted again."""
        terms = self._generator.buildQuery(lucene.CONTENTS, self._analyzer, java.text(query))
        if self._rows is None:
            return self._documents(terms, k)
        depth, documents = 2 * k, self._documents(terms, 2 * k)
        while len(documents) == depth and documents[-1][1] == documents[k - 1][1]:
            depth *= 2
            documents = self._documents(terms, depth)
        rows = [(int(self._rows[number]), score) for number, score in documents]
        return sorted(rows, key=lambda pair: (-pair[1], pair[0]))[:k]

    def _documents(self, terms: object, k: int) -> list[tuple[int, float]]:
        return [(each.doc, each.score) for each in self._searcher.search(terms, k).scoreDocs]
