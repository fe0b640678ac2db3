"""Logs of older versions: columns that they lack are NULL."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from srl.store.schema import PARTS, sql_type


def union(table: str, sources: Sequence[str]) -> str:
    """SQL for the rows of all `sources` with current columns; a column that an older log lacks is NULL."""
    empty = ", ".join(f'NULL::{sql_type(field.type)} AS "{field.name}"' for field in PARTS[table])
    return " UNION ALL BY NAME ".join([f"(SELECT {empty} WHERE false)", *(f"({one})" for one in sources)])


def with_current_columns(batch: pa.Table, table: str) -> pa.Table:
    """`batch` with the current columns of `table`; those that an older log lacks are NULL."""
    schema = PARTS[table]
    for field in schema:
        if field.name not in batch.column_names:
            batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    return batch.select(schema.names).cast(schema)
