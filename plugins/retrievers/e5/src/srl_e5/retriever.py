"""Dense retrieval: passages and queries are encoded by the same model, and searched with faiss.

Files below `<index>/e5/`: `e5.json` (the encoder and its settings), `index.faiss`, and during a build
`embeddings.f32`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

from srl.errors import UserError
from srl.files import FORMAT, link_or_copy, read_json, write_json
from srl.index import PassageStore, RetrieverBase, keep_passages, open_passages
from srl.models.load import named_directory, pick_device
from srl.trajectory import Hit, Passage
from srl_e5 import faiss_index
from srl_e5.embeddings import Embeddings, embed
from srl_e5.encoder import Encoder
from srl_e5.model_settings import Settings, dimension_of, encoder_digest, resolve
from srl_e5.options import Options
from srl_e5.search import vector_search

INDEX, SETTINGS, EMBEDDINGS = "index.faiss", "e5.json", "embeddings.f32"
_SAVED = ("model", "query_prefix", "passage_prefix", "pooling", "normalize")
_SAMPLE, _MIN_COSINE = 16, 0.98
"""Passages compared with an imported index, and the minimum cosine, which allows for float16 vectors."""


class DenseRetriever(RetrieverBase):
    """Search by the similarity of vectors. Thread-safe."""

    name = "e5"
    resumable = True

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def identity(self) -> dict[str, str]:
        """What the results depend on besides the options: the weights, and the effective settings.

        A build calls this before it writes anything, so an invalid type of index is refused here.
        """
        settings = self._settings
        faiss_index.new_index(self._dimension, self.options.index)
        return {
            "encoder": encoder_digest(self._directory),
            "query prefix": settings.query_prefix,
            "passage prefix": settings.passage_prefix,
            "pooling": settings.pooling,
            "normalize": str(settings.normalize).lower(),
        }

    def build(self, passages: Iterable[Passage], directory: Path, progress: Callable[[int], None]) -> None:
        """Embed the passages and index the vectors. Continues an interrupted build in `directory`."""
        store, folder = keep_passages(passages, directory), directory / self.name
        self._save_settings(folder)
        index = faiss_index.new_index(self._dimension, self.options.index)
        embeddings = Embeddings(folder / EMBEDDINGS, self._dimension)
        if not (folder / INDEX).is_file():
            to_embed = len(store) - len(embeddings)
            faiss_index.check_feasible(index, self.options.index, len(store), to_embed, folder)
            embed(store, embeddings, lambda: self._load(self.options.dtype), progress)
            faiss_index.write_index(index, embeddings.read(), folder / INDEX)
        (folder / EMBEDDINGS).unlink(missing_ok=True)
        progress(len(store))

    def open(self, directory: Path) -> DenseRetriever:
        """A retriever that searches the memory-mapped index under `directory` with its encoder."""
        saved: dict[str, Any] = read_json(directory / self.name / SETTINGS, dict)
        unset = {name: saved[name] for name in _SAVED if name not in self.options.model_fields_set}
        opened = DenseRetriever(self.options.model_copy(update=unset))
        opened._start(directory)
        return opened

    def _start(self, directory: Path) -> None:
        path = directory / self.name / INDEX
        self._store, index = open_passages(directory), faiss_index.read_index(path)
        faiss_index.check_index(path, index, len(self._store), self._dimension, self.options.index)
        device = pick_device(self.options.device)
        self._encoder = self._load(self.options.dtype if device.type == "cuda" else "float32")
        self._vector_search = vector_search(index, self.options, device)
        self.search(["warm up"], 1)

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus.

        A score is the inner product of the two vectors. The other queries of a batch may change a query's
        vector, and so its scores, in the last digits.
        """
        if not queries:
            return []
        scores, rows = self._vector_search.search(self._encoder.queries(queries), k)
        return [
            [Hit(self._store[row], score) for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]

    def adopt(
        self, source: Path, store: PassageStore, directory: Path, progress: Callable[[int], None]
    ) -> None:
        """Import the faiss file `source` as the index under `directory`. The file is linked, not copied.

        It must contain the vectors of all passages, in their order, made with this encoder: a sample is
        compared. Raises UserError.
        """
        index = faiss_index.read_index(source)
        faiss_index.check_index(source, index, len(store), self._dimension, self.options.index)
        self._compare(source, index, store)
        self._save_settings(directory / self.name)
        link_or_copy(source, directory / self.name / INDEX)
        progress(len(store))

    @cached_property
    def _directory(self) -> Path:
        return named_directory(self.options.model, self.options.trust_remote_code, "retriever.e5")

    @cached_property
    def _dimension(self) -> int:
        return dimension_of(self._directory, self.options.trust_remote_code)

    @cached_property
    def _settings(self) -> Settings:
        return resolve(self._directory, self.options)

    def _load(self, dtype: str) -> Encoder:
        options = self.options
        return Encoder(
            self._directory,
            self._settings,
            query_max_length=options.query_max_length,
            passage_max_length=options.passage_max_length,
            dtype=dtype,
            device=pick_device(options.device),
            batch_size=options.batch_size,
            trust_remote_code=options.trust_remote_code,
        )

    def _save_settings(self, folder: Path) -> None:
        """Save the model and its effective settings, with which the index is opened later."""
        folder.mkdir(parents=True, exist_ok=True)
        model = self.options.model
        model = str(Path(model).resolve()) if Path(model).exists() else model
        write_json(folder / SETTINGS, {"format": FORMAT, "model": model, **asdict(self._settings)})

    def _compare(self, source: Path, index: Any, store: PassageStore) -> None:
        """Raise UserError unless `index` has this encoder's vectors of a sample of the passages.

        Compressed vectors cannot be compared.
        """
        if not isinstance(index, faiss.IndexFlat | faiss.IndexHNSW):
            return
        rows = np.unique(np.linspace(0, len(store) - 1, _SAMPLE).astype(int)).tolist()
        encoded = torch.from_numpy(self._load("float32").passages([store[row].contents for row in rows]))
        stored = torch.from_numpy(np.stack([index.reconstruct(row) for row in rows]))
        cosine = float(torch.nn.functional.cosine_similarity(encoded, stored).median())
        if cosine < _MIN_COSINE:
            raise UserError(
                f"{source} does not have {self.options.model}'s vectors of these passages: of {len(rows)} "
                f"compared, the median cosine is {cosine:.3f}",
                hint="check the corpus and its order, model, pooling and passage_prefix",
            )
