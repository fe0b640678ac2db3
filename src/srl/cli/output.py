"""Output: results on stdout, everything else on stderr, plain text if not a terminal.

All commands print through this module, so that no output can control the terminal: text is escaped, JSON has
its own escapes, and only `verbatim` writes text to a pipe unchanged. Secrets are hidden on stderr alone:
results are never altered.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from srl.safe import safe, safe_message

if TYPE_CHECKING:
    from rich.console import Console

    from srl.progress import Count

_WIDE = 1000
"""Console width without a terminal: lines for programs are not wrapped."""
_WIDE_ENOUGH = 120
"""Width of a terminal that has room for every column of a listing."""
_EVERY_S = 10.0
"""Seconds between two lines of progress without a terminal."""

_LEVELS = {
    -2: (logging.ERROR, logging.ERROR),
    -1: (logging.ERROR, logging.WARNING),
    0: (logging.WARNING, logging.INFO),
    1: (logging.INFO, logging.DEBUG),
    2: (logging.DEBUG, logging.DEBUG),
}
"""By verbosity, the levels of libraries' logs and of ours."""

_quiet = False
_barred = False
"""Whether a progress bar is shown; there is only one at a time."""


def set_verbosity(level: int) -> None:
    """Set the log level: 0 is normal, higher logs more; lower logs less, and hides notes."""
    from srl.safe import log_to_stderr

    global _quiet
    _quiet = level < 0
    log_to_stderr(*_LEVELS[min(max(level, -2), 2)])


def stdout() -> Console:
    """A rich console on stdout without markup, and without colours in a pipe."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The same on stderr."""
    return _console(sys.stderr)


def _console(stream: Any) -> Console:
    from rich.console import Console

    width = None if stream.isatty() else _WIDE
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def terminal_width() -> int:
    """Width of the terminal in columns; `sys.maxsize` without one."""
    from shutil import get_terminal_size

    return get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize


def line(text: object = "", *, flush: bool = False) -> None:
    """Print one or several lines of a result."""
    print(safe(str(text)), flush=flush)


def piece(text: str, style: str = "") -> None:
    """Print a part of a line at once, on a terminal in a style of rich; nothing is wrapped."""
    stdout().out(safe(text), style=style, end="")
    sys.stdout.flush()


def verbatim(text: str) -> None:
    """Print a whole file: unchanged in a pipe, escaped on a terminal."""
    sys.stdout.write(safe(text) if sys.stdout.isatty() else text)


def note(message: str) -> None:
    """Print a line for the user on stderr; nothing with `-q`."""
    if not _quiet:
        warn(message)


def warn(message: object) -> None:
    """Print a line for the user on stderr, also with `-q`."""
    print(safe_message(str(message)), file=sys.stderr)


def print_json(obj: object) -> None:
    """Print `obj` as JSON, including data classes, paths and numpy values; NaN becomes null."""
    from srl.browse.formatting import json_line

    print(json_line(obj, indent=2))


def print_rows(rows: Iterable[object]) -> None:
    """Print each of `rows` as a line of JSON, and nothing is held back in a pipe."""
    from srl.browse.formatting import json_line

    for row in rows:
        print(json_line(row))
    sys.stdout.flush()


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    one_line: bool = False,
    least: Sequence[str] = (),
) -> None:
    """Print rows under their headings: on a terminal as wide as it is, in a pipe aligned and never cut.

    The first column, by which a row is named, and numbers keep their width. On a terminal other texts wrap
    between words. With `one_line` each row is one line: texts are cut, and a narrow terminal has no columns
    of `least`. None is an empty cell.
    """
    cells = [["" if value is None else safe(str(value)).replace("\n", " ") for value in row]
             for row in (columns, *rows)]  # fmt: skip
    if not sys.stdout.isatty():
        print("\n".join(_aligned(cells)))
        return
    from rich.table import Table
    from rich.text import Text

    left_out = [name for name in columns if name in least] if terminal_width() < _WIDE_ENOUGH else []
    overflow: Literal["ellipsis", "fold"] = "ellipsis" if one_line else "fold"
    grid = Table(box=None, pad_edge=False, header_style="bold")
    places = [place for place, name in enumerate(columns) if name not in left_out]
    for place in places:
        is_whole = place == 0 or all(_is_number(row[place]) for row in cells[1:])
        grid.add_column(Text(columns[place], no_wrap=one_line), no_wrap=is_whole, overflow="ellipsis")
    for row in cells[1:]:
        grid.add_row(*(Text(row[place], no_wrap=one_line, overflow=overflow) for place in places))
    stdout().print(grid)
    if left_out:
        note(f"no room for {', '.join(left_out)}; a wider terminal or a pipe shows all")


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines with aligned columns; a Chinese or Japanese character is two cells wide."""
    width: Callable[[str], int] = len
    if not all(cell.isascii() for row in rows for cell in row):
        from rich.cells import cell_len as width
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    padded = (
        [cell + " " * (wide - width(cell)) for cell, wide in zip(row, widths, strict=True)] for row in rows
    )
    return ["  ".join(row).rstrip() for row in padded]


def _is_number(cell: str) -> bool:
    with suppress(ValueError):
        float(cell or 0)
        return True
    return False


def stdin_lines(prompt: str = "") -> Iterator[str]:
    """The lines of stdin without their ends, each after `prompt` if it is typed on a terminal.

    On a terminal the line can be edited, and earlier ones recalled, where Python has readline.
    """
    if not sys.stdin.isatty():
        if isinstance(sys.stdin, TextIOWrapper) and sys.stdin.errors == "strict":
            sys.stdin.reconfigure(errors="surrogateescape")  # which `checked_text` refuses
        yield from (text.rstrip("\n") for text in iter(sys.stdin.readline, ""))
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it once it is imported
    with suppress(EOFError):
        while True:
            if not sys.stdout.isatty():  # stdout has the results alone
                print(prompt, end="", file=sys.stderr, flush=True)
            yield input(prompt if sys.stdout.isatty() else "")
    print(file=sys.stderr)


def checked_text(text: str, noun: str) -> str:
    """The text. Raises UserError where it has bytes that are not UTF-8; `noun` says what it is."""
    from srl.errors import UserError

    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UserError(f"the {noun} is not UTF-8")
    return text


@contextmanager
def progress(
    description: str, total: int | None = None, start: int = 0, *, passing: bool = False
) -> Iterator[Count]:
    """Show a progress bar on stderr; yields a function to call with the number done so far, and a few words.

    Without a terminal it prints a line every 10 s and one at the end; with `-q` nothing. A `passing` bar
    disappears at the end, and prints no last line. Inside another bar nothing is shown. `start` of them were
    done before, and do not count as its speed.
    """
    global _barred
    if _barred:
        yield lambda done, so_far="": None
    elif sys.stderr.isatty() and not _quiet:
        _barred = True
        try:
            with _bar(description, total, start, passing) as update:
                yield update
        finally:
            _barred = False
    else:
        with _lines(description, total, start, passing) as update:
            yield update


@contextmanager
def _lines(description: str, total: int | None, start: int, passing: bool) -> Iterator[Count]:
    began = noted_s = monotonic()
    last = start

    def share(done: int) -> str:
        return f"{done:,} of {total:,}" if total else f"{done:,}"

    def count(done: int, so_far: str = "") -> None:
        nonlocal noted_s, last
        last, now = done, monotonic()
        if now - noted_s >= _EVERY_S:
            noted_s = now
            from srl.browse.formatting import duration

            left_s = (now - began) * (total - done) / (done - start) if total and done > start else 0
            parts = [share(done), f"{duration(left_s)} left" if left_s else "", so_far]
            note(f"{description}: {', '.join(filter(None, parts))}")

    yield count
    if not passing:
        note(f"{description}: {share(last)}")


@contextmanager
def _bar(description: str, total: int | None, start: int, passing: bool) -> Iterator[Count]:
    from rich import progress as bars

    text, elapsed = bars.TextColumn("{task.description}", markup=False), bars.TimeElapsedColumn()
    columns: tuple[Any, ...] = bars.SpinnerColumn("line"), text, elapsed
    if total:
        remaining = bars.TextColumn("left"), bars.TimeRemainingColumn()
        columns = text, bars.BarColumn(), bars.MofNCompleteColumn(), elapsed, *remaining
    title = safe(description)
    with bars.Progress(
        *columns, console=stderr(), speed_estimate_period=300, transient=passing, redirect_stdout=False
    ) as bar:
        task = bar.add_task(title, total=total, completed=start)

        def count(done: int, so_far: str = "") -> None:
            label = title if total or not done else f"{title} {done:,}"
            bar.update(task, completed=done, description=f"{label}, {safe(so_far)}" if so_far else label)

        yield count


def show_counted() -> None:
    """Show the progress that the stages report, each as a passing bar."""
    from srl.progress import show_with

    show_with(partial(progress, passing=True))
