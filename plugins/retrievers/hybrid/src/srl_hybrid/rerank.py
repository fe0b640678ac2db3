"""Reranks the candidates of any retriever with a cross-encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from srl.errors import UserError
from srl.files import FORMAT, read_json, write_json
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
from srl.index.timing import timed
from srl.trajectory import Hit, Passage
from srl_hybrid.cross_encoder import CrossEncoder
from srl_hybrid.fusion import best, followed_by
from srl_hybrid.inner_retriever import hits_of, named_errors
from srl_hybrid.options import RerankOptions

MODEL_FILE = "model.json"
"""File in the retriever's folder with the name or path of the cross-encoder, which is not in the digest."""


class RerankRetriever(RetrieverBase):
    """Finds candidates with one retriever and sorts the first `depth` by a cross-encoder's scores.

    If a search requests more, the others follow in the retriever's order.
    """

    name = "rerank"

    def __init__(self, options: RerankOptions) -> None:
        self.options = options
        self._retriever = load_retriever(options.retriever, {**options.options, **options.runtime})
        self.live, self.resumable = self._retriever.live, self._retriever.resumable
        self._store: PassageStore | None = None
        self._encoder: CrossEncoder | None = None

    def identity(self) -> dict[str, str]:
        """The digest of the cross-encoder's weights, and the identity of the candidates' retriever."""
        with named_errors(self.options.retriever):
            inner = self._retriever.identity()
        return {**inner, "cross-encoder": self._loaded().digest}

    def build(
        self, passages: Iterable[Passage] | None, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Build the index of the candidates' retriever, and save the name of the cross-encoder.

        A live retriever has no passages.
        """
        model = self._loaded().model
        with named_errors(self.options.retriever):
            if passages is None:
                build_live(self._retriever, directory, progress)
            else:
                self._retriever.build(keep_passages(passages, directory), directory, progress)
        (directory / self.name).mkdir(exist_ok=True)
        write_json(directory / self.name / MODEL_FILE, {"format": FORMAT, "model": model})

    def open(self, directory: Path | None) -> RerankRetriever:
        """Open the retriever on `directory` and load the cross-encoder. Raises UserError."""
        with named_errors(self.options.retriever):
            self._retriever = open_retriever(self._retriever, directory)
        if directory is not None and not self.live:
            self._store = open_passages(directory)
        encoder = self._loaded(_saved_model(directory / self.name / MODEL_FILE) if directory else None)
        encoder.scores([("warm", "up")])
        return self

    def _loaded(self, saved: str | None = None) -> CrossEncoder:
        """The cross-encoder of the options, else the saved one; loaded once. Raises UserError."""
        if self._encoder is None:
            chosen = self.options
            model = chosen.model or saved
            if model is None:
                raise UserError(
                    "rerank needs a cross-encoder; type: --set model=DIRECTORY, or a name on the hub "
                    "such as cross-encoder/ms-marco-MiniLM-L12-v2"
                )
            self._encoder = CrossEncoder(
                model, max_length=chosen.max_length, dtype=chosen.dtype, device=chosen.device,
                batch_size=chosen.batch_size, trust_remote_code=chosen.trust_remote_code,
            )  # fmt: skip
        return self._encoder

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus.

        Raises the first Fault; `outcomes` has one result per query.
        """
        return hits_of(self.outcomes(queries, k))

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or a fault of the retriever or the cross-encoder."""
        if not queries:
            return []
        found = outcomes_of(self._retriever, queries, max(k, self.options.depth))
        passages = [[] if isinstance(one, Fault) else [hit.passage for hit in one] for one in found]
        with timed("rerank"):
            scored = self._scores(queries, [each[: self.options.depth] for each in passages])
        return [
            one if isinstance(one, Fault) else self._ranked(each, scores, k)
            for one, each, scores in zip(found, passages, scored, strict=True)
        ]

    def _scores(self, queries: list[str], candidates: list[list[Passage]]) -> list[np.ndarray]:
        """For each query the scores of its candidates."""
        pairs = [
            (query, text_of(passage))
            for query, passages in zip(queries, candidates, strict=True)
            for passage in passages
        ]
        bounds = np.cumsum([len(passages) for passages in candidates])[:-1]
        return np.split(self._loaded().scores(pairs) if pairs else np.empty(0), bounds)

    def _ranked(self, passages: list[Passage], scores: np.ndarray, k: int) -> list[Hit] | Fault:
        if not np.isfinite(scores).all():
            return Fault("failed", "the cross-encoder's score is not a number; try --set dtype=float32")
        by_id = {passage.id: passage for passage in passages}
        reranked = (passage.id for passage in passages[: self.options.depth])
        rated = followed_by(dict(zip(reranked, scores.tolist(), strict=True)), by_id)
        first = {passage_id: rank for rank, passage_id in enumerate(by_id)}
        place = first.__getitem__ if self._store is None else self._store.row
        return [Hit(by_id[one], rated[one]) for one in best(rated, k, place)]


def _saved_model(path: Path) -> str | None:
    """The saved name of an index's cross-encoder; None without a file. Raises UserError if it is invalid."""
    if not path.is_file():
        return None
    found = read_json(path, dict[str, Any]).get("model")
    if not isinstance(found, str):
        raise UserError(f"{path}: expected the name of a cross-encoder in 'model', found {found!r}")
    return found


def text_of(passage: Passage) -> str:
    """The cross-encoder's input for a passage: the title without quotation marks, then the text."""
    return f"{passage.title} {passage.text}".strip()
