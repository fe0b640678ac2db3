"""Text that other people wrote, made safe for a terminal and short enough for a table."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from datetime import date
from math import isfinite
from typing import Any

_ACTS = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
_JOINERS = {"\u200c", "\u200d"}
_KEEP = {"\n", "\t"} | _JOINERS


def safe(text: str) -> str:
    """`text` with everything that acts on a terminal written out: `\\x1b[31m`, `\\u202e`.

    Control and format characters (colours, cursor, titles, right-to-left overrides) show as escapes;
    line ends, tabs and the joiners of scripts and emoji stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(letter) for letter in text.replace("\r\n", "\n"))


def _visible(letter: str) -> str:
    if letter in _KEEP or unicodedata.category(letter) not in _ACTS:
        return letter
    code = ord(letter)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def one_line(text: str, width: int | None = None) -> str:
    """`text` safe, on one line, and cut to `width` letters with an ellipsis."""
    line = re.sub(r"\s+", " ", safe(text)).strip()
    return line if width is None or len(line) <= width else line[: width - 1].rstrip() + "…"


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


def json_line(value: object) -> str:
    """`value` as JSON on one line: NaN becomes null, and what would act on a terminal an escape."""
    text = json.dumps(_known(value), ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() else "".join(map(_json_visible, text))


def _json_visible(letter: str) -> str:
    if letter in _JOINERS or unicodedata.category(letter) not in _ACTS:
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else json.dumps(letter)[1:-1]


def _known(value: Any) -> Any:
    """`value` as what JSON knows; dates in ISO format, anything else by its text."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _known(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return value.isoformat() if isinstance(value, date) else str(value)
