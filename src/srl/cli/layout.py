"""Fits tables to a terminal: rows of text become lines of limited width.

Widths are in terminal cells: a Chinese, Japanese or Korean character takes two, a combining character none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

GAP = 2
_NARROWEST = 12
"""Smallest width of a text column."""
_LAST = 20
"""Smallest width of the last column."""
_PROSE = 32
"""Smallest width for sentences beside the other columns; with less they go below."""
_INDENT = 4
_NAMED = 3
"""How many left-out columns are named; further ones are counted."""
_WIDE = r"\u2e80-\U0010ffff"
"""Chinese, Japanese and Korean characters, and emoji, as a range of a regular expression."""

Row = Sequence[str]


def cell_len(text: str) -> int:
    """The terminal cells of `text`; rich is imported only for non-ASCII text."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len as of_any

    return of_any(text)


def wrapped(rows: Sequence[Row], width: int) -> list[str]:
    """Lines of a table whose last column is prose, which wraps between words, beside the others or below."""
    widths = _widths([row[:-1] for row in rows])
    start = sum(widths) + GAP * len(widths)
    if max((cell_len(row[-1]) for row in rows), default=0) <= width - start or width - start >= _PROSE:
        return [line for row in rows for line in _beside(row, widths, start, width)]
    aligned = widths if start - GAP <= width else [0] * len(widths)
    return [line for row in rows for line in _below(row, aligned, width)]


def _beside(row: Row, widths: Sequence[int], start: int, width: int) -> list[str]:
    first, *more = prose(row[-1], width - start)
    return [_line([*row[:-1], first], [*widths, 0]), *(" " * start + line for line in more)]


def _below(row: Row, widths: Sequence[int], width: int) -> list[str]:
    return [_line(row[:-1], widths), *(" " * _INDENT + line for line in prose(row[-1], width - _INDENT))]


def prose(text: str, width: int) -> list[str]:
    """`text` in lines of `width`; words are not split, so that URLs can be copied."""
    return [text] if cell_len(text) <= width else _filled(text, max(width, 1))


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


def fitted(
    rows: Sequence[Row], width: int, least: Sequence[str] = (), by_end: Collection[str] = ()
) -> tuple[list[str], str]:
    """Lines of a table with one line per row, headings first, and a description of what is not shown.

    Columns are left out until the others fit: those in `least` first, then from the right. The remaining
    width goes to the columns that need it. Cells are cut at the end, in columns of `by_end` at the beginning.
    """
    heads = rows[0]
    kept = _kept(rows, width, least)
    shown = [[row[place] for place in kept] for row in rows]
    widths = _shared(_widths(shown), _narrowest(shown), width - GAP * (len(kept) - 1))
    ends = [heads[place] in by_end for place in kept]
    lines = [_line(list(map(cut, row, widths, ends)), widths) for row in shown]
    left_out = [head for place, head in enumerate(heads) if place not in kept]
    is_cut = any(cell_len(cell) > wide for row in shown for cell, wide in zip(row, widths, strict=True))
    told = [f"columns omitted: {_few(left_out)}"] if left_out else []
    return lines, "; ".join([*told, *(["cells truncated"] if is_cut else [])])


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _kept(rows: Sequence[Row], width: int, least: Sequence[str]) -> list[int]:
    """The positions of the columns that fit."""
    heads = rows[0]
    kept = list(range(len(heads)))
    dropped = [heads.index(name) for name in least if name in heads]
    dropped += [place for place in reversed(kept) if place not in dropped]
    for place in dropped:
        needed = _narrowest([[row[at] for at in kept] for row in rows])
        if sum(needed) + GAP * (len(kept) - 1) <= width or len(kept) == 1:
            break
        kept.remove(place)
    return kept


def _narrowest(rows: Sequence[Row]) -> list[int]:
    """The smallest width of each column; numbers are never cut."""
    columns = list(zip(*rows, strict=True))
    return [
        max(map(cell_len, column))
        if all(_is_number(cell) for cell in column[1:])
        else min(max(map(cell_len, column)), _LAST if place == len(columns) - 1 else _NARROWEST)
        for place, column in enumerate(columns)
    ]


def _is_number(cell: str) -> bool:
    try:
        float(cell or 0)
    except ValueError:
        return False
    return True


def _shared(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """A width for each column between `least` and `wanted`; columns that need least get it first."""
    widths = list(least)
    spare = room - sum(widths)
    waiting = sorted((want - low, place) for place, (want, low) in enumerate(zip(wanted, least, strict=True)))
    for count, (missing, place) in enumerate(waiting):
        given = max(min(missing, spare // (len(waiting) - count)), 0)
        widths[place] += given
        spare -= given
    return widths


def cut(text: str, width: int, by_end: bool = False) -> str:
    """`text` in at most `width` cells, with an ellipsis at the end, or at the beginning with `by_end`."""
    if cell_len(text) <= width:
        return text
    from rich.cells import set_cell_size

    if by_end:
        return "…" + set_cell_size(text[::-1], width - 1)[::-1].lstrip()
    return set_cell_size(text, width - 1).rstrip() + "…"


def _widths(rows: Sequence[Row]) -> list[int]:
    return [max(map(cell_len, column)) for column in zip(*rows, strict=True)]


def _line(cells: Row, widths: Sequence[int]) -> str:
    padded = (cell + " " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True))
    return (" " * GAP).join(padded).rstrip()
