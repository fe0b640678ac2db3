"""Tables in files of their own beside the parts: rescores, and which watches fired.

log/rescores/1a2b3c4d5e6f.parquet    measures that were computed later, all of the same rewards; the name
                                     is a digest of their description
log/watches.parquet                  replaced as a whole, so a run that is rolled back keeps the reason
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from srl.errors import parsing
from srl.files import atomic_file, digest_text
from srl.store.schema import RESCORE_SCHEMA, WATCH_SCHEMA

RESCORES = "rescores"
WATCHES = "watches.parquet"

Write = Callable[[pa.Table], None]


def files_beside(log: Path) -> dict[str, list[Path]]:
    """The files of each of these tables, by its name in the schema `raw`."""
    return {"rescores": rescore_files(log), "watches": [*log.glob(WATCHES)]}


def rescore_files(log: Path) -> list[Path]:
    """The files of a log's rescores."""
    return sorted((log / RESCORES).glob("*.parquet"))


def rescore_file(log: Path, rewards: str) -> Path:
    """The file of the rescores of `rewards`, a description."""
    return log / RESCORES / f"{digest_text(rewards)[:12]}.parquet"


def read_rescores(file: Path) -> pa.Table:
    """The rows of `file`, none if there is no such file. Raises UserError, which names it."""
    if not file.is_file():
        return RESCORE_SCHEMA.empty_table()
    with parsing(file):
        return pq.read_table(file, schema=RESCORE_SCHEMA)


@contextmanager
def writing_rescores(file: Path) -> Iterator[Write]:
    """Inside, rows are written; `file` has them when the body ends without an error."""
    with _writing(file, RESCORE_SCHEMA) as write:
        yield write


def drop_rescores(
    log: Path, gone: Callable[[int, str, str], bool], files: Iterable[Path] | None = None
) -> None:
    """Drop the rows of trajectories that the log has no longer, those with `gone(step, phase, id)`, from
    `files` (default: all)."""
    for file in rescore_files(log) if files is None else files:
        rescores = read_rescores(file)
        keys = zip(*(rescores[name].to_pylist() for name in ("step", "phase", "trajectory_id")), strict=True)
        left = rescores.filter(pa.array([not gone(*key) for key in keys], pa.bool_()))
        if left.num_rows == 0:
            file.unlink()
        elif left.num_rows < rescores.num_rows:
            with writing_rescores(file) as write:
                write(left)


def write_watches(log: Path, run_id: str, fired: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of a log's watches by `fired`, in order; without any there is no file."""
    if not fired:
        (log / WATCHES).unlink(missing_ok=True)
        return
    rows = [{"run_id": run_id, "number": number, **row} for number, row in enumerate(fired, start=1)]
    with _writing(log / WATCHES, WATCH_SCHEMA) as write:
        write(pa.Table.from_pylist(rows, WATCH_SCHEMA))


@contextmanager
def _writing(file: Path, schema: pa.Schema) -> Iterator[Write]:
    with (
        atomic_file(file, "wb") as out,
        pq.ParquetWriter(out, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        yield writer.write_table
