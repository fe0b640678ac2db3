"""Builds and reads faiss indexes, each in one file."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from srl.errors import UserError, first_line

_PREFIX = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*' failed: ?)?(?=\S)")
"""Function, file and line, and often the condition, before what faiss's error says."""
_TRAIN_PER_LIST, _TRAIN_AT_LEAST = 64, 65_536


def new_index(dimension: int, spec: str) -> Any:
    """An empty faiss index for inner products. Raises UserError if faiss rejects the factory string."""
    try:
        return faiss.index_factory(dimension, spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"faiss cannot create the index {spec!r} with {dimension} dimensions: {_reason(error)}",
            key="retriever.e5.index",
            hint="for example HNSW64",
        ) from error


def is_flat(index: Any) -> bool:
    """Whether the index is a plain array of float32 vectors that is searched exhaustively."""
    return isinstance(index, faiss.IndexFlat)


def check_feasible(index: Any, spec: str, passages: int, to_embed: int, folder: Path) -> None:
    """Raise UserError, before a long embedding, if the index could not be built afterwards."""
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and passages < ivf.nlist:
        raise UserError(
            f"{spec} has {ivf.nlist:,} lists, the corpus only {passages:,} passages", key="retriever.e5.index"
        )
    keeps_vectors = "Flat" in spec or "HNSW" in spec
    size = (to_embed + (passages if keeps_vectors else 0)) * index.d * 4
    free = shutil.disk_usage(folder).free
    if free < size:
        raise UserError(
            f"{folder}: embedding {to_embed:,} passages takes {size / 1e9:,.1f} GB of disk, "
            f"{free / 1e9:,.1f} GB are free"
        )


def write_index(index: Any, vectors: np.ndarray, target: Path) -> None:
    """Train `index` on a sample where it needs that, add all `vectors` (N, D), and write it to `target`.

    The index is assembled in memory; `vectors` may be memory-mapped.
    """
    if not index.is_trained:
        _train(index, vectors)
    index.add(vectors)
    part = target.with_name(target.name + ".part")
    try:
        faiss.write_index(index, str(part))
    except RuntimeError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{target} could not be written: {_reason(error)}") from error
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def read_index(path: Path) -> Any:
    """The index in the file, memory-mapped if faiss can. Raises UserError if the file is not an index."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise UserError(f"{path} is not a complete faiss index: {_reason(error)}") from error


def check_index(path: Path, index: Any, passages: int, dimension: int, spec: str) -> None:
    """Raise UserError unless `index`, read from `path`, has one vector of this dimension per passage, for
    inner products, and the type of `spec`."""
    if (index.ntotal, index.d) != (passages, dimension):
        raise UserError(
            f"{path} has {index.ntotal:,} vectors of dimension {index.d}; expected {passages:,}, one a "
            f"passage of the corpus, of dimension {dimension}, the encoder's"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UserError(f"{path} compares vectors by distance; expected one made for inner products")
    expected = new_index(index.d, spec)
    if type(index) is not type(expected) and not (is_flat(index) and is_flat(expected)):
        raise UserError(
            f"{path} is a faiss {type(index).__name__}, {spec} stands for {type(expected).__name__}",
            key="retriever.e5.index",
            hint="give its real type, for example HNSW64",
        )


def vectors_of(index: Any) -> np.ndarray:
    """A view of the vectors of a Flat index, (N, D) float32."""
    return faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)


def _train(index: Any, vectors: np.ndarray) -> None:
    """Train on a sample of rows with a fixed seed, so that the build is deterministic."""
    ivf = faiss.try_extract_index_ivf(index)
    lists = ivf.nlist if ivf is not None else 0
    size = min(len(vectors), max(_TRAIN_PER_LIST * lists, _TRAIN_AT_LEAST))
    sample = np.sort(np.random.default_rng(0).choice(len(vectors), size, replace=False))
    try:
        index.train(vectors[sample])
    except RuntimeError as error:
        raise UserError(
            f"the index could not be trained on {size:,} passages: {_reason(error)}",
            key="retriever.e5.index",
            hint="for a small corpus use Flat",
        ) from error


def _reason(error: BaseException) -> str:
    """The message of a faiss error, without the function, file and condition."""
    return _PREFIX.sub("", first_line(error))
