"""Measures that were computed later, in files beside the parts: `log/rescores/1a2b3c4d5e6f.parquet`.

A file has what was computed of the same rewards; its name is a digest of their description.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srl.errors import parsing
from srl.files import atomic_file, digest_text
from srl.store.schema import RESCORE_SCHEMA


def rescore_files(log: Path) -> list[Path]:
    """The files of a log's rescores."""
    return sorted((log / "rescores").glob("*.parquet"))


def rescore_file(log: Path, rewards: str) -> Path:
    """The file of the rescores of `rewards`, a description."""
    return log / "rescores" / f"{digest_text(rewards)[:12]}.parquet"


def read_rescores(file: Path) -> pa.Table:
    """The rows of `file`, none if there is no such file. Raises UserError, which names it."""
    if not file.is_file():
        return RESCORE_SCHEMA.empty_table()
    with parsing(file):
        return pq.read_table(file, schema=RESCORE_SCHEMA)


@contextmanager
def writing_rescores(file: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Inside, rows are written; `file` has them when the body ends without an error."""
    with (
        atomic_file(file, "wb") as out,
        pq.ParquetWriter(out, RESCORE_SCHEMA, compression="zstd", write_page_checksum=True) as writer,
    ):
        yield writer.write_table


def drop_rescores(log: Path, gone: Callable[[int, str, str], bool]) -> None:
    """Drop the rows of trajectories that the log has no longer, those with `gone(step, phase, id)`."""
    for file in rescore_files(log):
        rescores = read_rescores(file)
        keys = zip(*(rescores[name].to_pylist() for name in ("step", "phase", "trajectory_id")), strict=True)
        remaining = rescores.filter(pa.array([not gone(*key) for key in keys], pa.bool_()))
        if remaining.num_rows == 0:
            file.unlink()
        elif remaining.num_rows < rescores.num_rows:
            with writing_rescores(file) as write:
                write(remaining)
