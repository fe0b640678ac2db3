"""Rows of a query as cells of a table, or as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from srl.browse.formatting import duration, json_line, number
from srl.safe_text import one_line, secrets


def cells(
    rows: Iterable[Mapping[str, Any]], columns: Iterable[str], digits: int | None = 3
) -> list[list[str]]:
    """The `columns` of each row as text on one line; without `digits` numbers are exact to six figures."""
    names, found = list(columns), secrets()
    return [[_cell(row[name], name, digits, found) for name in names] for row in rows]


def _cell(value: Any, name: str, digits: int | None, found: tuple[str, ...]) -> str:
    if not isinstance(value, float):
        return one_line(_text(value), found=found)
    if digits is None:
        return f"{value:.6g}"
    return duration(value) if name == "seconds" else number(value, digits)


def _text(value: Any) -> str:
    """A value as text: nothing for NULL, lists and the like as JSON."""
    if isinstance(value, list | tuple | dict):
        return json_line(value)
    return "" if value is None else str(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header, its values as they are; lists and the like as JSON."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_text(cell) for cell in row] for row in rows)
    return written.getvalue()
