"""Fits text to a terminal.

Widths are in terminal cells: a Chinese, Japanese or Korean character takes two, a combining character none.
"""

from __future__ import annotations

import re

_INDENT = 4
_WIDE = r"\u2e80-\U0010ffff"
"""Chinese, Japanese and Korean characters, and emoji, as a range of a regular expression."""


def cell_len(text: str) -> int:
    """The terminal cells of `text`; rich is imported only for non-ASCII text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len as of_any

    return of_any(text)


def snippet(text: str, width: int, lines: int = 3) -> str:
    """The first `lines` lines of `text` with a hanging indent, and an ellipsis if more follows."""
    found = _filled(text, width, " " * _INDENT, longest=max(width - _INDENT, 1))
    if len(found) > lines:
        found[lines - 1 :] = [cut(_filled(found[lines - 1], width - 2)[0] + " …", width)]
    return "\n".join(found)


def _filled(text: str, width: int, indent: str = "", longest: int | None = None) -> list[str]:
    """`text` in lines of `width`, all but the first indented; words longer than `longest` are split.

    A line breaks at spaces and beside wide characters, whose scripts have no spaces.
    """
    unit_of = rf"(\s*)([{_WIDE}]|[^\s{_WIDE}]{{1,{longest or ''}}})"
    lines = [""]
    for gap, unit in re.findall(unit_of, text):
        if lines[-1].strip() and cell_len(lines[-1] + gap + unit) > width:
            lines.append(indent + unit)
        else:
            lines[-1] += gap + unit
    return lines


def cut(text: str, width: int, by_end: bool = False) -> str:
    """`text` in at most `width` cells, with an ellipsis at the end, or at the beginning with `by_end`."""
    if cell_len(text) <= width:
        return text
    from rich.cells import set_cell_size

    if by_end:
        return "…" + set_cell_size(text[::-1], width - 1)[::-1].lstrip()
    return set_cell_size(text, width - 1).rstrip() + "…"
