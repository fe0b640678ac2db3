"""Reranks the candidates of one or several retrievers with a cross-encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from srl.errors import UserError
from srl.files import FORMAT, read_json, write_json
from srl.index import Fault
from srl.trajectory import Hit, Passage
from srl_hybrid.cross_encoder import CrossEncoder
from srl_hybrid.fusion import followed_by
from srl_hybrid.hybrid import HybridRetriever
from srl_hybrid.options import RerankOptions

MODEL_FILE = "model.json"
"""File in the retriever's folder with the name or path of the cross-encoder, which is not in the digest."""


class RerankRetriever(HybridRetriever):
    """Finds passages as `hybrid` does, and sorts the first `candidates` by a cross-encoder's scores.

    If a search requests more, the others follow as they were found.
    """

    name = "rerank"
    options: RerankOptions

    def __init__(self, options: RerankOptions) -> None:
        super().__init__(options)
        self._encoder: CrossEncoder | None = None

    def identity(self) -> dict[str, str]:
        """The digest of the cross-encoder's weights, and what the candidates depend on."""
        return {**super().identity(), "cross-encoder": self._loaded().digest}

    def build(
        self, passages: Iterable[Passage] | None, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Build the indexes of the retrievers, and save the name of the cross-encoder."""
        model = self._loaded().model
        super().build(passages, directory, progress)
        (directory / self.name).mkdir(exist_ok=True)
        write_json(directory / self.name / MODEL_FILE, {"format": FORMAT, "model": model})

    def open(self, directory: Path | None) -> RerankRetriever:
        """Open the retrievers on `directory`, and load the cross-encoder of the options or the saved one."""
        super().open(directory)
        saved: dict[str, Any] = {}
        if directory is not None:
            saved = read_json(directory / self.name / MODEL_FILE, dict)
        self._loaded(saved.get("model")).scores([("warm", "up")])
        return self

    def _loaded(self, saved: str | None = None) -> CrossEncoder:
        """The cross-encoder of the options, else the saved one; loaded once. Raises UserError."""
        if self._encoder is None:
            options = self.options
            model = options.model or saved
            if not model:
                raise UserError(
                    "rerank needs a cross-encoder",
                    key="retriever.rerank.model",
                    hint="a directory, or a name on the hub such as cross-encoder/ms-marco-MiniLM-L12-v2",
                )
            self._encoder = CrossEncoder(
                model, max_length=options.max_length, dtype=options.dtype, device=options.device,
                batch_size=options.batch_size, trust_remote_code=options.trust_remote_code,
            )  # fmt: skip
        return self._encoder

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or a fault of a retriever or the cross-encoder."""
        outcomes = super().outcomes(queries, max(k, self.options.candidates))
        candidates = [
            [] if isinstance(outcome, Fault) else [hit.passage for hit in outcome[: self.options.candidates]]
            for outcome in outcomes
        ]
        return [
            outcome if isinstance(outcome, Fault) else self._reranked(outcome, own, k)
            for outcome, own in zip(outcomes, self._scores(queries, candidates), strict=True)
        ]

    def _scores(self, queries: list[str], candidates: list[list[Passage]]) -> list[np.ndarray]:
        """For each query the scores of its own candidates."""
        pairs = [
            (query, text_of(passage))
            for query, passages in zip(queries, candidates, strict=True)
            for passage in passages
        ]
        ends = np.cumsum([len(passages) for passages in candidates])
        return np.split(self._loaded().scores(pairs), ends[:-1]) if pairs else [np.empty(0)] * len(queries)

    def _reranked(self, hits: list[Hit], scores: np.ndarray, k: int) -> list[Hit] | Fault:
        if not np.isfinite(scores).all():
            return Fault("failed", "the cross-encoder's score is not a number; try --set dtype=float32")
        passages = {hit.passage.id: hit.passage for hit in hits}
        rated = dict(zip(passages, scores.tolist(), strict=False))
        return self._best(followed_by(rated, passages), passages, k)


def text_of(passage: Passage) -> str:
    """The cross-encoder's input for a passage: the title without quotation marks, then the text."""
    return f"{passage.title} {passage.text}".strip()
