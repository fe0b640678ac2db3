"""Numbers and values as text that is short enough for a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date
from math import isfinite
from typing import Any

from srl.safe_text import hidden, safe_json, secrets


def number(value: float | int | None, digits: int = 3) -> str:
    """A number for people: at most `digits` after the point, empty where there is none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.{digits}g}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


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


def json_line(value: object, found: tuple[str, ...] | None = None) -> str:
    """`value` as JSON on one line: NaN becomes null, what would act on a terminal an escape."""
    return safe_json(
        json.dumps(_known(value, secrets() if found is None else found), ensure_ascii=False, allow_nan=False)
    )


def _known(value: Any, found: tuple[str, ...]) -> Any:
    """`value` as what JSON knows; dates in ISO format, anything else by its text, no secret `found`."""
    if isinstance(value, str):
        return hidden(value, found)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _known(item, found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item, found) for item in value]
    return value.isoformat() if isinstance(value, date) else hidden(str(value), found)
