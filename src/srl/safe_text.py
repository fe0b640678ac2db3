"""Text that other people wrote, made safe to show: nothing in it acts on a terminal.

Everything that prints, logs or raises uses these functions, so there is one rule for what is shown.
"""

from __future__ import annotations

import json
import re
import unicodedata

_ACTS = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories of control, format, surrogate and private characters, and of line separators."""
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


def safe_json(text: str) -> str:
    """JSON `text` with what would act on a terminal as JSON's own escapes; its line ends stay."""
    return text if text.isprintable() else "".join(map(_json_visible, text))


def _json_visible(letter: str) -> str:
    if letter in _KEEP or unicodedata.category(letter) not in _ACTS:
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else json.dumps(letter)[1:-1]
