"""Builds a faiss index, in one file, from embeddings on disk."""

from __future__ import annotations

import os
import re
import shutil
import struct
from logging import getLogger
from pathlib import Path
from typing import Any

import numpy as np

from srl.errors import UserError, first_line
from srl.install import pip_install
from srl_e5.embedding_files import Shards
from srl_e5.options import Options

_log = getLogger("srl.e5")
_TRAIN_PER_LIST, _TRAIN_AT_LEAST = 64, 65_536
_WHERE = re.compile(r"^Error in .*? at \S+:\d+: (Error: '.*' failed: ?)?(?=\S)")
"""The prefix of faiss's error messages: function, file and line, and often the condition that failed."""
_ROWS_AT, _FLOATS_AT = 4 + 4, 37
"""Offsets, in the file of a Flat index, of its number of rows (int64) and of its numbers (uint64)."""


def load_faiss() -> Any:
    """The module faiss. Raises UserError if neither of its two packages is installed."""
    try:
        import faiss
    except ImportError as error:
        raise UserError(
            f"dense search needs faiss; type: {pip_install('cpu', of='srl-search-e5')}, "
            "or [gpu] on a machine with CUDA (one of them, not both)"
        ) from error
    return faiss


def new_index(dimension: int, spec: str) -> Any:
    """An empty faiss index for inner products. Raises UserError if faiss rejects the factory string."""
    faiss = load_faiss()
    try:
        return faiss.index_factory(dimension, spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise UserError(
            f"retriever.e5.index={spec!r}: faiss cannot create this index with {dimension} dimensions "
            f"({reason(error)}); type for example --set retriever.e5.index=HNSW64"
        ) from error


def is_flat(index: Any) -> bool:
    """Whether the index is a plain array of float32 vectors that is searched exhaustively."""
    return isinstance(index, load_faiss().IndexFlat)


def check_kind(path: Path, index: Any, spec: str) -> None:
    """Raise UserError unless `index`, read from `path`, uses inner products and has the type of `spec`."""
    if index.metric_type != load_faiss().METRIC_INNER_PRODUCT:
        raise UserError(f"{path} compares vectors by distance; expected one made for inner products")
    expected = new_index(index.d, spec)
    if type(index) is not type(expected) and not (is_flat(index) and is_flat(expected)):
        raise UserError(
            f"{path} is a faiss {type(index).__name__}, index={spec} stands for {type(expected).__name__}; "
            "give its real type, for example --set retriever.e5.index=HNSW64"
        )


def check_feasible(index: Any, options: Options, passages: int, to_embed: int, folder: Path) -> None:
    """Raise UserError, before a long embedding, if the index could not be built afterwards."""
    ivf = load_faiss().try_extract_index_ivf(index)
    if ivf is not None and passages < ivf.nlist:
        raise UserError(
            f"retriever.e5.index={options.index!r} has {ivf.nlist:,} lists, the corpus only {passages:,} "
            "passages; type --set retriever.e5.index=Flat, or fewer lists"
        )
    needed, free = disk_needed(index, options, to_embed), shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: embedding {to_embed:,} passages takes {needed / 1e9:,.1f} GB of disk, "
            f"{free / 1e9:,.1f} GB are free; choose another --out"
        )


def disk_needed(index: Any, options: Options, rows: int) -> int:
    """Peak disk usage of a build in bytes: the vectors, plus one shard or a second copy."""
    beside = min(rows, options.shard_size) if is_flat(index) else 0
    if not is_flat(index) and ("Flat" in options.index or "HNSW" in options.index):
        beside = rows
    return (rows + beside) * index.d * 4


def make_index(index: Any, shards: Shards, total: int, target: Path, train_size: int) -> None:
    """Write the index of the `total` vectors in `shards` as `target`, and remove the shards."""
    if is_flat(index):
        _move_into_flat(index, shards, total, target)
    else:
        _add_to(index, shards, total, target, train_size)
    shards.remove()


def moved_rows(index: Any, shards: Shards, target: Path) -> int:
    """How many vectors an interrupted build has already moved from the shards to the file of a Flat index."""
    part = _part(target)
    if not is_flat(index) or not part.is_file():
        return 0
    rows = max(0, part.stat().st_size - len(_header(index))) // (index.d * 4)
    left = shards.first()
    return rows if left is None else min(rows, left)


def _move_into_flat(empty: Any, shards: Shards, total: int, target: Path) -> None:
    """Write the Flat index `target` by appending one shard after the other.

    A shard is removed once its vectors have been appended and flushed to disk. So at most one shard is on
    disk twice, nothing is held in memory, and an interrupted build can be continued.
    """
    part, header = _part(target), _header(empty)
    moved = moved_rows(empty, shards, target)
    with open(part, "r+b" if part.exists() else "w+b") as file:
        file.write(_filled_in(header, total, empty.d))
        file.truncate(file.seek(len(header) + moved * empty.d * 4))
        for _, path, vectors in shards.chunks(moved):
            file.write(np.ascontiguousarray(vectors).data)
            _sync(file)
            path.unlink()
        _sync(file)
    os.replace(part, target)


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _header(empty: Any) -> bytes:
    return load_faiss().serialize_index(empty).tobytes()


def _filled_in(header: bytes, total: int, dimension: int) -> bytes:
    """The header of an empty Flat index, changed to `total` vectors."""
    filled = bytearray(header)
    struct.pack_into("<q", filled, _ROWS_AT, total)
    struct.pack_into("<Q", filled, _FLOATS_AT, total * dimension)
    return bytes(filled)


def _add_to(index: Any, shards: Shards, total: int, target: Path, train_size: int) -> None:
    """Train `index` on a sample, add all shards, and write it to `target`. The index is built in memory."""
    if not index.is_trained:
        _train(index, shards, total, train_size)
    added = 0
    for first, _, vectors in shards.chunks(0):
        index.add(np.ascontiguousarray(vectors))
        tenths, added = 10 * added // total, first + len(vectors)
        if 10 * added // total > tenths:
            _log.info("%s of %s vectors are in the index", f"{added:,}", f"{total:,}")
    _write(index, target)


def _train(index: Any, shards: Shards, total: int, train_size: int) -> None:
    """Train on a sample of rows with a fixed seed, so that the build is deterministic."""
    ivf = load_faiss().try_extract_index_ivf(index)
    lists = ivf.nlist if ivf is not None else 0
    size = min(total, train_size or max(_TRAIN_PER_LIST * lists, _TRAIN_AT_LEAST))
    chosen = np.sort(np.random.default_rng(0).choice(total, size, replace=False))
    _log.info("training the index on %s of %s passages", f"{size:,}", f"{total:,}")
    try:
        index.train(shards.rows(chosen))
    except RuntimeError as error:
        raise UserError(
            f"the index could not be trained on {size:,} passages ({reason(error)}); "
            "type --set retriever.e5.index=Flat, or train on more: --set retriever.e5.train_size=N"
        ) from error


def _write(index: Any, target: Path) -> None:
    """Write faiss's own file format, atomically."""
    part = _part(target)
    try:
        load_faiss().write_index(index, str(part))
    except RuntimeError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"{target} could not be written: {reason(error)}") from error
    with open(part, "r+b") as file:
        _sync(file)
    os.replace(part, target)


def read_index(path: Path) -> Any:
    """The index in the file, memory-mapped if faiss can. Raises UserError if the file is not an index."""
    faiss = load_faiss()
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise UserError(
            f"{path} is not a complete faiss index ({reason(error)}); copy, pull or build it again"
        ) from error


def reason(error: BaseException) -> str:
    """The message of a faiss error, without the function, file and condition."""
    return _WHERE.sub("", first_line(error))


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
