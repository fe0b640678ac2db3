"""The table of watches: which fired, in one small file beside the log's other tables.

It is replaced as a whole, so that steps which are dropped later take nothing of it with them: a run that is
rolled back keeps the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from srl.files import atomic_file
from srl.store.beside import read_beside
from srl.store.schema import WATCH_SCHEMA


def watch_file(log: Path) -> Path:
    """The file of a log's watches, which exists once one has fired."""
    return log / "watches.parquet"


def read_watches(log: Path) -> pa.Table:
    """The rows of a log, in the order in which they fired. Raises DamagedError."""
    return read_beside(watch_file(log), WATCH_SCHEMA)


def write_watches(log: Path, run_id: str, fired: Sequence[Mapping[str, Any]]) -> None:
    """Replace the rows of a log by `fired`, in order; without any there is no file."""
    if not fired:
        watch_file(log).unlink(missing_ok=True)
        return
    rows = [{"run_id": run_id, "number": number, **row} for number, row in enumerate(fired, start=1)]
    with (
        atomic_file(watch_file(log), "wb") as file,
        pq.ParquetWriter(file, WATCH_SCHEMA, compression="zstd", write_page_checksum=True) as writer,
    ):
        writer.write_table(pa.Table.from_pylist(rows, WATCH_SCHEMA))
