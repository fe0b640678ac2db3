"""Numbers, values and rows as text: cells of a table, CSV, JSON on one line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date
from itertools import pairwise
from math import isfinite
from typing import Any

from srl.safe import one_line, safe_json


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for people: at most `digits` after the point, empty for None."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.{digits}g}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def counted(amount: int, noun: str, many: str = "") -> str:
    """A number with its noun: `1 turn`, `2,000 turns`."""
    return f"{amount:,} {noun if amount == 1 else many or f'{noun}s'}"


_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 40


def bars(values: Sequence[float]) -> str:
    """The values as at most `_WIDTH` bars between the lowest and the highest, each the mean of a stretch."""
    count = min(_WIDTH, len(values))
    cuts = [round(n * len(values) / count) for n in range(count + 1)]
    means = [sum(values[start:stop]) / (stop - start) for start, stop in pairwise(cuts)]
    low, span = min(means), max(means) - min(means)
    heights = [int((mean - low) / span * 7.999) if span else 0 for mean in means]
    return "".join(_BARS[height] for height in heights)


def signed(value: float) -> str:
    """A number with its sign: `+0.500`."""
    return f"{value:+.3f}"


def duration(seconds: float | None) -> str:
    """Hours, minutes and seconds: `1h 02m`, `3m 20s`, `45s`."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def json_line(value: object, indent: int | None = None) -> str:
    """`value` as JSON, on one line unless it is indented: NaN becomes null, terminal control characters are
    escaped."""
    return safe_json(json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    """`value` in JSON's types: data classes and numpy's arrays too, dates in ISO format, the rest as text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return value.isoformat() if isinstance(value, date) else str(value)


def cells(
    rows: Iterable[Mapping[str, Any]], columns: Iterable[str], digits: int | None = 3
) -> list[list[str]]:
    """The `columns` of each row as one-line texts; without `digits` numbers have six significant digits."""
    names = list(columns)
    return [[cell(row[name], name, digits) for name in names] for row in rows]


def cell(value: Any, name: str = "", digits: int | None = None) -> str:
    """A value of the column `name` as a text of one line."""
    if isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
        return one_line(" | ".join(value))
    if not isinstance(value, float):
        return one_line(_text(value))
    if digits is None:
        return f"{value:.6g}"
    return duration(value) if name == "seconds" else number(value, digits)


def _text(value: Any) -> str:
    """A value as text: nothing for NULL, lists and the like as JSON."""
    if isinstance(value, list | tuple | dict):
        return json_line(value)
    return "" if value is None else str(value)


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """CSV with a header and unrounded values; lists and the like as JSON."""
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_text(cell) for cell in row] for row in rows)
    return written.getvalue()
