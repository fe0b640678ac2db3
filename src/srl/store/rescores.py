"""Rescores: measures of a log's trajectories that were computed later, in files beside the log's tables.

log/rescores/1a2b3c4d5e6f.parquet    all of the same rewards; the name is a digest of their description
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srl.files import atomic_file, digest_text
from srl.store.beside import read_beside
from srl.store.schema import RESCORE_SCHEMA

DIRECTORY = "rescores"


def rescore_files(log: Path) -> list[Path]:
    """The files of a log's rescores."""
    return sorted((log / DIRECTORY).glob("*.parquet"))


def rescore_file(log: Path, rewards: str) -> Path:
    """The file of the rescores of `rewards`, a description."""
    return log / DIRECTORY / f"{digest_text(rewards)[:12]}.parquet"


def read_rescores(file: Path) -> pa.Table:
    """The rows of `file`, which may not exist. Raises DamagedError."""
    return read_beside(file, RESCORE_SCHEMA)


@contextmanager
def writing_rescores(file: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Inside, rows are written; `file` has them when the body ends without an error."""
    with (
        atomic_file(file, "wb") as out,
        pq.ParquetWriter(out, RESCORE_SCHEMA, compression="zstd", write_page_checksum=True) as writer,
    ):
        yield writer.write_table


def drop_rescores(
    log: Path, gone: Callable[[int, str, str], bool], files: Iterable[Path] | None = None
) -> None:
    """Drop the rows of trajectories that the log has no longer, those with `gone(step, phase, id)`, from
    `files` (default: all)."""
    for file in rescore_files(log) if files is None else files:
        found = read_rescores(file)
        keys = zip(*(found[name].to_pylist() for name in ("step", "phase", "trajectory_id")), strict=True)
        left = found.filter(pa.array([not gone(*key) for key in keys], pa.bool_()))
        if left.num_rows == 0:
            file.unlink()
        elif left.num_rows < found.num_rows:
            with writing_rescores(file) as write:
                write(left)
