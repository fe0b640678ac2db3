"""Several retrievers over one corpus whose rankings are fused into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from srl.errors import UserError
from srl.index import (
    Fault,
    RetrieverBase,
    keep_passages,
    load_retriever,
    open_passages,
    open_retriever,
    outcomes_of,
)
from srl.trajectory import Hit, Passage
from srl_hybrid.fusion import best, fuse_first
from srl_hybrid.inner_retriever import hits_of, named_errors
from srl_hybrid.options import HybridOptions


class HybridRetriever(RetrieverBase):
    """Reciprocal-rank fusion. Each retriever has a folder of its own; the passages are shared."""

    name = "hybrid"

    def __init__(self, options: HybridOptions) -> None:
        self.options = options
        self._retrievers = {
            name: load_retriever(name, {**built, **options.runtime.get(name, {})})
            for name, built in options.retrievers.items()
        }
        for name, retriever in self._retrievers.items():
            if retriever.live:
                raise UserError(
                    f"retriever.hybrid.retrievers: {name} searches an external service; only rankings of one "
                    "corpus can be fused; use it as a named retriever: "
                    f"--set search.retrievers.{name}.index=DIR"
                )
        self.resumable = any(retriever.resumable for retriever in self._retrievers.values())

    def identity(self) -> dict[str, str]:
        """What each retriever's results depend on besides its options, prefixed with its name."""
        found = dict[str, str]()
        for name, retriever in self._retrievers.items():
            with named_errors(name):
                found |= {f"{name} {key}": digest for key, digest in retriever.identity().items()}
        return found

    def build(self, passages: Iterable[Passage], directory: Path, progress: Callable[[int], None]) -> None:
        """Build all indexes, one after the other; `progress` gets the mean over all of them.

        Resumable retrievers are built first, so that an interruption loses only the work of the others.
        """
        store = keep_passages(passages, directory)
        order = sorted(self._retrievers.items(), key=lambda item: item[1].resumable, reverse=True)
        for position, (name, retriever) in enumerate(order):
            before = position * len(store)
            with named_errors(name):
                retriever.build(store, directory, lambda done, n=before: progress((n + done) // len(order)))

    def open(self, directory: Path) -> HybridRetriever:
        """Open all retrievers on `directory`."""
        self._store = open_passages(directory)
        for name, retriever in self._retrievers.items():
            with named_errors(name):
                self._retrievers[name] = open_retriever(retriever, directory)
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus.

        Raises the first Fault; `outcomes` has one result per query.
        """
        return hits_of(self.outcomes(queries, k))

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or the fault of a retriever."""
        if not queries:
            return []
        depth = max(k, self.options.depth)
        found = {name: outcomes_of(one, queries, depth) for name, one in self._retrievers.items()}
        return [
            self._fused(dict(zip(found, rankings, strict=True)), k)
            for rankings in zip(*found.values(), strict=True)
        ]

    def _fused(self, found: dict[str, list[Hit] | Fault], k: int) -> list[Hit] | Fault:
        rankings = dict[str, list[str]]()
        passages = dict[str, Passage]()
        for name, outcome in found.items():
            if isinstance(outcome, Fault):
                return Fault(outcome.status, f"{name}: {outcome}", outcome.retry_after_s)
            rankings[name] = [hit.passage.id for hit in outcome]
            passages |= {hit.passage.id: hit.passage for hit in outcome}
        chosen = self.options
        scores = fuse_first(rankings, chosen.weights, chosen.rank_constant, chosen.depth)
        return [Hit(passages[one], scores[one]) for one in best(scores, k, self._row)]

    def _row(self, passage_id: str) -> int:
        row = self._store.row(passage_id)
        if row is None:
            raise KeyError(passage_id)
        return row
