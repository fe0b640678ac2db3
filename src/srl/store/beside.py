"""Tables in files of their own beside the log's other tables: reading one as a whole."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from srl.store.database import in_one_line
from srl.store.run_info import DamagedError


def read_beside(file: Path, schema: pa.Schema) -> pa.Table:
    """The rows of `file`, none if there is no such file. Raises DamagedError, which names it."""
    if not file.is_file():
        return schema.empty_table()
    try:
        return pq.read_table(file, schema=schema)
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not a fault of what is in the file
            raise
        raise DamagedError(
            f"{file} is damaged: {in_one_line(error)}; restore or remove it, and repeat the command"
        ) from error
