"""Dense retrieval: passages and queries are encoded by the same model, and searched with faiss.

Files below `<index>/e5/`: `e5.json` (the encoder and its settings), `index.faiss`, and during a build
`embeddings/` and `index.faiss.part`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from srl.errors import UserError
from srl.files import link_or_copy, read_json, write_json
from srl.index import PassageStore, RetrieverBase, keep_passages, open_passages
from srl.index.timing import timed
from srl.model import pick_device
from srl.trajectory import Hit, Passage
from srl_e5 import faiss_index
from srl_e5.embedding_files import Shards
from srl_e5.encoder import Encoder
from srl_e5.model_settings import Settings, dimension_of, encoder_digest, model_directory, resolve
from srl_e5.options import Options
from srl_e5.search import vector_search

INDEX, SETTINGS, EMBEDDINGS = "index.faiss", "e5.json", "embeddings"
_REMEMBERED = ("model", "query_prefix", "passage_prefix", "pooling", "normalize")
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

        After `open`, those of the opened encoder. A build calls this before it writes anything, so an
        invalid type of index is refused here. Raises UserError.
        """
        settings = self._settings
        faiss_index.new_index(self._dimension, self.options.index)
        return {
            "encoder": self._digest,
            "query prefix": settings.query_prefix,
            "passage prefix": settings.passage_prefix,
            "pooling": settings.pooling,
            "normalize": str(settings.normalize).lower(),
        }

    def build(self, passages: Iterable[Passage], directory: Path, progress: Callable[[int], None]) -> None:
        """Embed the passages and index the vectors. Continues an interrupted build in `directory`.

        `progress` first gets the number of passages already embedded, then a count that grows with the
        embedded tokens, so that the time left can be estimated.
        """
        store, folder = keep_passages(passages, directory), directory / self.name
        folder.mkdir(parents=True, exist_ok=True)
        index = faiss_index.new_index(self._dimension, self.options.index)
        shards = Shards(folder / EMBEDDINGS, self._dimension)
        self._save_settings(folder, store)
        if not (folder / INDEX).is_file():
            moved = faiss_index.moved_rows(index, shards, folder / INDEX)
            faiss_index.check_feasible(index, self.options, len(store), len(store) - moved, folder)
            self._embed(store, shards, moved, progress)
            faiss_index.make_index(index, shards, len(store), folder / INDEX, self.options.train_size)
        progress(len(store))

    def open(self, directory: Path) -> DenseRetriever:
        """Memory-map the index under `directory` and load its encoder. Raises UserError."""
        folder = directory / self.name
        saved = _read_settings(folder)
        remembered = {name: saved[name] for name in _REMEMBERED if name not in self.options.model_fields_set}
        self._use(self.options.model_copy(update=remembered))
        self._store = open_passages(directory)
        index = faiss_index.read_index(folder / INDEX)
        _check_size(folder / INDEX, index, len(self._store), self._dimension, self._directory)
        device = pick_device(self.options.device)
        self._encoder = self._load(device, self.options.dtype if device.type == "cuda" else "float32")
        self._vector_search = vector_search(index, self.options, device)
        self.search(["warm up"], 1)
        return self

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus.

        A score is the inner product of the two vectors. The other queries of a batch may change a query's
        vector, and so its scores, in the last digits.
        """
        if not queries:
            return []
        with timed("embed"):
            vectors = self._encoder.queries(queries)
        with timed("search"):
            scores, rows = self._vector_search.search(vectors, k)
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
        _check_size(source, index, len(store), self._dimension, self._directory)
        faiss_index.check_kind(source, index, self.options.index)
        self._compare(source, index, store)
        folder = directory / self.name
        folder.mkdir(parents=True, exist_ok=True)
        self._save_settings(folder, store)
        link_or_copy(source, folder / INDEX)
        progress(len(store))

    def _use(self, options: Options) -> None:
        """Replace the options, and clear the values cached for the old ones."""
        self.options = options
        for name in ("_directory", "_dimension", "_settings", "_digest"):
            self.__dict__.pop(name, None)

    @cached_property
    def _directory(self) -> Path:
        return model_directory(self.options.model, self.options.trust_remote_code)

    @cached_property
    def _dimension(self) -> int:
        return dimension_of(self._directory, self.options.trust_remote_code)

    @cached_property
    def _settings(self) -> Settings:
        return resolve(self._directory, self.options)

    @cached_property
    def _digest(self) -> str:
        return encoder_digest(self._directory)

    def _load(self, device: torch.device, dtype: str) -> Encoder:
        chosen = self.options
        return Encoder(
            self._directory,
            self._settings,
            query_max_length=chosen.query_max_length,
            passage_max_length=chosen.passage_max_length,
            dtype=dtype,
            device=device,
            batch_size=chosen.batch_size,
            trust_remote_code=chosen.trust_remote_code,
        )

    def _save_settings(self, folder: Path, store: PassageStore) -> None:
        """Save the settings of the build. Raises UserError if the folder contains an index with others."""
        local = Path(self.options.model).exists()
        settings = self._settings
        saved: dict[str, Any] = {
            "model": str(Path(self.options.model).resolve()) if local else self.options.model,
            "query_prefix": settings.query_prefix,
            "passage_prefix": settings.passage_prefix,
            "pooling": settings.pooling,
            "normalize": settings.normalize,
            "encoder": self._digest,
            "index": self.options.index,
            "passages": len(store),
            "bytes": int(store.arrays[0][-1]),
        }
        if (folder / SETTINGS).is_file():
            before = _read_settings(folder)
            differ = [name for name, value in saved.items() if name != "model" and before.get(name) != value]
            if differ:
                raise UserError(
                    f"{folder} contains an index with another {differ[0]}; remove it, or choose another"
                )
        write_json(folder / SETTINGS, {"format": 1, **saved})

    def _embed(self, store: PassageStore, shards: Shards, row: int, progress: Callable[[int], None]) -> None:
        """Add the missing vectors of the passages from `row` on to `shards`."""
        row = shards.end(row)
        progress(row)
        if row == len(store):
            return
        encoder = self._load(pick_device(self.options.device), self.options.dtype)
        while row < len(store):
            first, size = row, min(self.options.shard_size, len(store) - row)
            texts = [store[place].contents for place in range(first, first + size)]
            report = lambda share, first=first, size=size: progress(first + int(share * size))  # noqa: E731
            shards.save(first, encoder.passages(texts, report))
            row = shards.end(first)

    def _compare(self, source: Path, index: Any, store: PassageStore) -> None:
        """Check a sample: `index` must contain this encoder's vectors of these passages. Raises UserError."""
        faiss = faiss_index.load_faiss()
        if not isinstance(index, faiss.IndexFlat | faiss.IndexHNSW):
            return
        rows = np.unique(np.linspace(0, len(store) - 1, _SAMPLE).astype(int))
        encoder = self._load(pick_device(self.options.device), "float32")
        ours = encoder.passages([store[row].contents for row in rows.tolist()])
        theirs = np.stack([index.reconstruct(row) for row in rows.tolist()])
        lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        cosine = float(np.median((ours * theirs).sum(1) / np.maximum(lengths, 1e-12)))
        if cosine < _MIN_COSINE:
            raise UserError(
                f"{source} does not contain {self.options.model}'s vectors of these passages: of "
                f"{len(rows)} compared, the median cosine is {cosine:.3f}; check the corpus and its order, "
                "model, pooling and passage_prefix"
            )


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    if not path.is_file():
        raise UserError(f"{path} is missing: the dense index is incomplete; copy or build it again")
    saved: dict[str, Any] = read_json(path, dict)
    if missing := [name for name in _REMEMBERED if name not in saved]:
        raise UserError(f"{path}: {', '.join(missing)} missing; build the index again")
    return saved


def _check_size(path: Path, index: Any, passages: int, dimension: int, model: Path) -> None:
    """Raise UserError unless the index has one vector per passage, of the model's dimension."""
    if index.ntotal != passages:
        raise UserError(
            f"{path} has {index.ntotal:,} vectors for {passages:,} passages; "
            "expected one for each: give the corpus that it was built from"
        )
    if index.d != dimension:
        raise UserError(
            f"{path} has vectors of dimension {index.d}, those of {model} have {dimension}; "
            "give the model that it was built with: --set retriever.e5.model=DIR"
        )
