"""Several retrievers over one corpus whose rankings are fused into one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from srl.errors import UserError
from srl.index import (
    Fault,
    PassageStore,
    RetrieverBase,
    build_live,
    keep_passages,
    load_retriever,
    open_passages,
    open_retriever,
    outcomes_of,
)
from srl.trajectory import Hit, Passage
from srl_hybrid.fusion import best, fuse
from srl_hybrid.options import HybridOptions


class HybridRetriever(RetrieverBase):
    """Reciprocal-rank fusion. Each retriever has a folder of its own; the passages are shared."""

    name = "hybrid"

    def __init__(self, options: HybridOptions) -> None:
        self.options = options
        self._retrievers = {
            name: load_retriever(name, {**index_options, **options.runtime.get(name, {})})
            for name, index_options in options.retrievers.items()
        }
        self.live = any(retriever.live for retriever in self._retrievers.values())
        if self.live and len(self._retrievers) > 1:
            raise UserError(
                "only rankings of one corpus can be fused, and one of these searches an external service",
                key=f"{options.where}.retrievers",
                hint="use it as a named retriever: search.retrievers",
            )
        self.resumable = any(retriever.resumable for retriever in self._retrievers.values())
        self._store: PassageStore | None = None

    def identity(self) -> dict[str, str]:
        """What each retriever's results depend on besides its options, prefixed with its name."""
        return {
            f"{name} {key}": value
            for name, retriever in self._retrievers.items()
            for key, value in retriever.identity().items()
        }

    def build(
        self, passages: Iterable[Passage] | None, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Build all indexes, one after the other; `progress` gets the mean over all of them.

        Resumable retrievers are built first, so that an interruption loses only the work of the others. A
        live retriever gets no passages.
        """
        if passages is None:
            for retriever in self._retrievers.values():
                build_live(retriever, directory, progress)
            return
        store = keep_passages(passages, directory)
        order = sorted(self._retrievers.values(), key=lambda retriever: not retriever.resumable)
        for position, retriever in enumerate(order):
            before = position * len(store)
            retriever.build(store, directory, lambda count, n=before: progress((n + count) // len(order)))

    def open(self, directory: Path | None) -> HybridRetriever:
        """Open all retrievers on `directory`."""
        if directory is not None and not self.live:
            self._store = open_passages(directory)
        for name, retriever in self._retrievers.items():
            self._retrievers[name] = open_retriever(retriever, directory)
        return self

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or the fault of a retriever."""
        depth = max(k, self.options.depth)
        outcomes = [outcomes_of(retriever, queries, depth) for retriever in self._retrievers.values()]
        return [self._fused(rankings, k) for rankings in zip(*outcomes, strict=True)]

    def _fused(self, outcomes: tuple[list[Hit] | Fault, ...], k: int) -> list[Hit] | Fault:
        rankings, passages = dict[str, list[str]](), dict[str, Passage]()
        for name, outcome in zip(self._retrievers, outcomes, strict=True):
            if isinstance(outcome, Fault):
                return Fault(outcome.status, f"{name}: {outcome}", outcome.retry_after_s)
            rankings[name] = [hit.passage.id for hit in outcome]
            passages |= {hit.passage.id: hit.passage for hit in outcome}
        options = self.options
        scores = fuse(rankings, options.weights, options.rank_constant, options.depth)
        return self._best(scores, passages, k)

    def _best(self, scores: Mapping[str, float], passages: Mapping[str, Passage], k: int) -> list[Hit]:
        """The `k` passages with the highest scores, ties in the order of the corpus or of `passages`."""
        order = {passage_id: place for place, passage_id in enumerate(passages)}
        place = order.__getitem__ if self._store is None else self._row
        return [Hit(passages[passage_id], scores[passage_id]) for passage_id in best(scores, k, place)]

    def _row(self, passage_id: str) -> int:
        row = self._store.row(passage_id) if self._store else None
        if row is None:
            raise KeyError(passage_id)
        return row
