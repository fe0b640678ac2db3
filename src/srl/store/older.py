"""Logs of older versions: columns that they lack are NULL, and columns with old names are renamed."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from srl.renamed import COLUMNS, renamed
from srl.store.schema import PARTS, sql_type


def union(table: str, sources: Sequence[str]) -> str:
    """SQL for the rows of all `sources` with current columns.

    A column that an older log lacks is NULL; one with an old name is renamed.
    """
    names = COLUMNS.get(table, {})
    fields = [(field.name, field) for field in PARTS[table]]
    fields += [(old, PARTS[table].field(new)) for old, new in names.items()]
    empty = ", ".join(f'NULL::{sql_type(field.type)} AS "{name}"' for name, field in fields)
    both = " UNION ALL BY NAME ".join([f"(SELECT {empty} WHERE false)", *(f"({one})" for one in sources)])
    if not names:
        return both
    current = ", ".join(f'coalesce("{new}", "{old}") AS "{new}"' for old, new in names.items())
    return f"SELECT * EXCLUDE ({', '.join(names)}) REPLACE ({current}) FROM ({both})"


def with_current_columns(batch: pa.Table, table: str) -> pa.Table:
    """`batch` with the current columns of `table`; those that an older log lacks are NULL."""
    schema, names = PARTS[table], COLUMNS.get(table, {})
    batch = batch.rename_columns([names.get(name, name) for name in batch.column_names])
    for field in schema:
        if field.name not in batch.column_names:
            batch = batch.append_column(field, pa.nulls(batch.num_rows, field.type))
    return batch.select(schema.names).cast(schema)


def old_column_hints(column: str) -> list[str]:
    """The current name of a column, for each table in which `column` is an old name."""
    return [
        renamed(f"{table}.{column}", f"{table}.{names[column]}")
        for table, names in COLUMNS.items()
        if column in names
    ]
