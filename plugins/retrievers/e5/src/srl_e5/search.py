"""Vector search with faiss, or with matrix products on a GPU. Ties are in the order of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any

import faiss
import numpy as np
import torch

from srl.errors import UserError
from srl.models.load import pick_device
from srl_e5.exact import TorchSearch, upload
from srl_e5.faiss_index import is_flat, vectors_of
from srl_e5.options import Options

Found = tuple[np.ndarray, np.ndarray]
Find = Callable[[np.ndarray, int], Found]
"""From queries (Q, D) and k to scores and rows, both (Q, k), best first; row −1 if fewer are found."""

_EXTRA = 8
"""Candidates beyond k, to detect ties with the k-th."""
_SLACK = {"float32": 1e-5, "float16": 4e-3}
"""Maximum rounding difference between two computations of one score, relative to the best score."""
_MAX_K_ON_GPU = 2048
"""The largest k of faiss on a GPU."""


class ExactSearch:
    """Exhaustive search. The ranking is decided by float32 scores that do not depend on batch or device.

    `find` may be fast and imprecise. All candidates whose score is within its rounding error of the k-th
    are scored again, one vector at a time. So equal vectors have equal scores, and equal scores are in
    the order of the corpus.
    """

    def __init__(self, index: Any, find: Find, slack: float) -> None:
        self._index, self._find, self._slack = index, find, slack

    def search(self, queries: np.ndarray, k: int) -> Found:
        """Scores and rows of the `k` best of each query, both (Q, k); `k` is at most the index's size."""
        total = self._index.ntotal
        k = min(k, total)
        scores, rows = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
        open_, fetch = np.arange(len(queries)), min(total, k + _EXTRA)
        while len(open_):
            rough, candidates = self._find(queries[open_], fetch)
            exact = self._scores(queries[open_], candidates)
            ordered, best = in_order(exact, candidates)
            scores[open_], rows[open_] = ordered[:, :k], best[:, :k]
            margin = self._slack * np.abs(ordered[:, 0])
            tied = rough[:, -1] >= ordered[:, k - 1] - margin
            open_ = open_[tied & (fetch < total)]
            fetch = min(total, 4 * fetch)
        return scores, rows

    def _scores(self, queries: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The inner products of each query with its `rows` (Q, k), float32."""
        queries, rows = np.ascontiguousarray(queries), np.ascontiguousarray(rows)
        scores = np.empty(rows.shape, np.float32)
        self._index.compute_distance_subset(
            len(queries), faiss.swig_ptr(queries), rows.shape[1], faiss.swig_ptr(scores), faiss.swig_ptr(rows)
        )
        return scores


class ApproximateSearch:
    """Search of HNSW, IVF, PQ and similar indexes with faiss; equal scores in the order of the corpus."""

    def __init__(self, index: Any, find: Find) -> None:
        self._index, self._find = index, find

    def search(self, queries: np.ndarray, k: int) -> Found:
        """Scores and rows of up to `k` per query, both (Q, k); if fewer are found, the last rows are −1."""
        k = min(k, self._index.ntotal)
        scores, rows = in_order(*self._find(queries, min(self._index.ntotal, k + _EXTRA)))
        return scores[:, :k], rows[:, :k]


def in_order(scores: np.ndarray, rows: np.ndarray) -> Found:
    """Both (Q, k), sorted by descending score, then by row; rows of −1 last."""
    order = np.lexsort((rows, np.where(rows < 0, np.inf, -scores)), axis=1)
    return np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)


def vector_search(index: Any, options: Options, device: torch.device) -> ExactSearch | ApproximateSearch:
    """The search of `index` that the options select; `device` is the encoder's. Raises UserError."""
    if not is_flat(index):
        if options.search_on == "gpu":
            raise UserError(
                f"only Flat indexes are searched on a GPU, this one is {type(index).__name__}",
                key="retriever.e5.search_on",
            )
        _tune(index, options)
        return ApproximateSearch(index, _on_cpu(index, options.n_threads))
    gpu = _gpu(options, device)
    if gpu is None or not _fits(index, options, gpu):
        return ExactSearch(index, _on_cpu(index, options.n_threads), _SLACK["float32"])
    return ExactSearch(index, _on_gpu(index, gpu, options.n_threads), _SLACK["float16"])


def _gpu(options: Options, device: torch.device) -> torch.device | None:
    """The GPU to search on: the encoder's, or any if `search_on` is gpu; else None. Raises UserError."""
    if options.search_on == "cpu" or device.type == "cuda":
        return None if options.search_on == "cpu" else device
    return pick_device("cuda") if options.search_on == "gpu" else None


def _tune(index: Any, options: Options) -> None:
    """Set how thoroughly an approximate index searches, and the indexes inside it."""
    for name, value in (("nprobe", options.nprobe), ("efSearch", options.ef_search)):
        with suppress(RuntimeError):  # an index without this parameter
            faiss.ParameterSpace().set_index_parameter(index, name, value)


def _on_cpu(index: Any, n_threads: int) -> Find:
    def find(queries: np.ndarray, k: int) -> Found:
        if n_threads:
            faiss.omp_set_num_threads(n_threads)  # holds for the calling thread only
        return index.search(queries, k)

    return find


def _on_gpu(index: Any, device: torch.device, n_threads: int) -> Find:
    """Search float16 copies of the vectors: faiss on all GPUs if its GPU build is installed, else torch."""
    if getattr(faiss, "get_num_gpus", lambda: 0)() == 0:
        return TorchSearch(upload(vectors_of(index), device, torch.float16)).search
    options = faiss.GpuMultipleClonerOptions()
    options.shard, options.useFloat16 = True, True
    on_gpus, lock = faiss.index_cpu_to_all_gpus(index, co=options), Lock()
    on_cpu = _on_cpu(index, n_threads)

    def find(queries: np.ndarray, k: int) -> Found:
        if k > _MAX_K_ON_GPU:
            return on_cpu(queries, k)
        with lock:  # an index on a GPU serves one call at a time
            return on_gpus.search(queries, k)

    return find


def _fits(index: Any, options: Options, device: torch.device) -> bool:
    """Whether a float16 copy fits on the GPU. Raises UserError if it does not and `search_on` is gpu."""
    size, (free, _) = index.ntotal * index.d * 2, torch.cuda.mem_get_info(device)
    if size < 0.9 * free:
        return True
    if options.search_on == "gpu":
        raise UserError(
            f"the vectors take {size / 1e9:,.1f} GB in float16, {free / 1e9:,.1f} GB of {device} are free",
            key="retriever.e5.search_on",
        )
    return False
