"""Curves drawn as letters in a terminal, or as a picture file (PNG, SVG, PDF)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

from srl.browse.curve import Series, short_name
from srl.errors import UserError
from srl.files import atomic_file
from srl.install import pip_install

MARKS = "●○▲△■□◆◇"
_ASCII = str.maketrans("●○▲△■□◆◇┤│└┬─·…", "*o#x@+%&||+|-.~")
_STEP = " step"
_APART = 12


def plot(series: Sequence[Series], width: int = 80, height: int = 16, ascii_only: bool = False) -> str:
    """`series` as lines of text: marks at the points, dots between them, and axes.

    Points that share a column are drawn as their mean. `width` and `height` are of the whole plot without
    title and legend.
    """
    values = [value for one in series for value in one.values]
    ticks = round_ticks(min(values), max(values), max(height // 4, 2))
    digits = round_digits(ticks)
    names = [f"{tick:.{digits}f}" for tick in ticks]
    margin = max(map(len, names))
    columns, lines = max(width - margin - len(_STEP) - 2, 10), max(height - 2, 4)
    canvas = _Canvas(columns, lines, _span(series), (ticks[0], ticks[-1]))
    marks = (MARKS * (len(series) // len(MARKS) + 1))[: len(series)]
    for one, mark in zip(series, marks, strict=True):
        canvas.draw(one, mark)
    beside = dict(zip(map(canvas.row, ticks), names, strict=True))
    text = [f"{'':>{margin}}  {series[0].metric}"]
    for n, line in enumerate(canvas.text()):
        text.append(f"{beside.get(n, ''):>{margin}} {'┤' if n in beside else '│'}{line}")
    fired = _fired(series)
    text += [f"{'':>{margin}} {line}" for line in _axis(canvas, {step for _, step, _ in fired})]
    text += [f"{'':>{margin}}  {mark} {_legend(one)}" for one, mark in zip(series, marks, strict=True)]
    text += [f"{'':>{margin}}  ! step {step}: {names}{run}" for run, step, names in fired]
    drawn = "\n".join(line.rstrip() for line in text)
    return drawn.translate(_ASCII) if ascii_only else drawn


def _fired(series: Sequence[Series]) -> list[tuple[str, int, str]]:
    """`(run, step, watches)` of each mark of the runs, the run named where there are several."""
    runs = dict.fromkeys(one.run_id for one in series)
    marked = {one.run_id: one.marks for one in series}
    return [
        (f" in {short_name(run)}" if len(runs) > 1 else "", step, names)
        for run in runs
        for step, names in marked[run]
    ]


def _legend(one: Series) -> str:
    best = max(one.values)
    at = one.steps[one.values.index(best)]
    return f"{one.label}: {one.values[-1]:.4g} at step {one.steps[-1]}, highest {best:.4g} at step {at}"


class _Canvas:
    """A grid of characters over a range of steps and a range of values."""

    def __init__(self, columns: int, lines: int, steps: tuple[int, int], values: tuple[float, float]) -> None:
        self.columns, self.steps = columns, steps
        self._lines, self._values = lines, values
        self._grid = [[" "] * columns for _ in range(lines)]

    def text(self) -> list[str]:
        return ["".join(line) for line in self._grid]

    def column(self, step: int) -> int:
        first, last = self.steps
        return round((step - first) / (last - first) * (self.columns - 1))

    def row(self, value: float) -> int:
        low, high = self._values
        return round((high - value) / (high - low) * (self._lines - 1))

    def draw(self, one: Series, mark: str) -> None:
        shared: dict[int, list[float]] = {}
        for step, value in zip(one.steps, one.values, strict=True):
            shared.setdefault(self.column(step), []).append(value)
        points = [(column, self.row(sum(values) / len(values))) for column, values in shared.items()]
        for column, row in _between(points):
            if self._grid[row][column] == " ":
                self._grid[row][column] = "·"
        for column, row in points:
            self._grid[row][column] = mark


def _apart(low: float, high: float) -> tuple[float, float]:
    if max(abs(low), abs(high)) < 1e-300:  # ticks between such numbers are 0
        return 0, 1
    if low == high:
        return low - abs(low) * 0.1, high + abs(low) * 0.1
    return low, high


def _span(series: Sequence[Series]) -> tuple[int, int]:
    first = min(one.steps[0] for one in series)
    last = max(one.steps[-1] for one in series)
    return first, max(last, first + 1)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers, at least two, that cover `low` to `high`."""
    low, high = _apart(low, high)
    step = _round_step((high - low) / about)
    return [step * n for n in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= least * 0.999)


def round_digits(ticks: Sequence[float]) -> int:
    """The digits after the point that show the distance between `ticks` exactly."""
    step = ticks[1] - ticks[0]
    return next(
        digits for digits in range(13) if abs(round(step, digits) - step) < step * 1e-3 or digits == 12
    )


def _between(points: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The cells of the straight lines from point to point."""
    for (x0, y0), (x1, y1) in pairwise(points):
        length = max(abs(x1 - x0), abs(y1 - y0), 1)
        for n in range(length + 1):
            yield round(x0 + (x1 - x0) * n / length), round(y0 + (y1 - y0) * n / length)


def _axis(canvas: _Canvas, fired: Set[int]) -> list[str]:
    """The horizontal axis: a line with marks at round steps, and their numbers; `!` where a watch fired."""
    first, last = canvas.steps
    step = max(round(_round_step((last - first) / (canvas.columns // _APART or 1))), 1)
    line, labels = ["─"] * canvas.columns, [" "] * (canvas.columns + 1)
    for at in range(-(-first // step) * step, last + 1, step):
        column, text = canvas.column(at), str(at)
        line[column] = "┬"
        start = max(min(column - len(text) // 2, canvas.columns - len(text)), 0) + 1
        labels[start : start + len(text)] = text
    for at in fired:
        if first <= at <= last:
            line[canvas.column(at)] = "!"
    return [f"└{''.join(line)}", "".join(labels).rstrip() + _STEP]


FORMATS = (".png", ".svg", ".pdf")
_MANY = 60


def save_figure(panels: Sequence[Sequence[Series]], path: Path) -> None:
    """Draw one panel for each metric and write the picture; the file's suffix is its format."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"--out {path}: expected a name that ends in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"pictures need matplotlib; type: {pip_install('plot')}") from error
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "srl", "font.size": 10}):
        figure = Figure(figsize=(7.2, 3.4 * len(panels)), dpi=150, layout="constrained")
        for axes, series in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
            _panel(axes, series)
        with atomic_file(path, "wb") as file:
            figure.savefig(file, format=path.suffix[1:].lower(), metadata=_metadata(path))


def _panel(axes, series: Sequence[Series]) -> None:
    from matplotlib.ticker import MaxNLocator

    for one in series:
        mark = "o" if len(one.steps) <= _MANY else None
        axes.plot(one.steps, one.values, marker=mark, markersize=3.5, linewidth=1.6, label=_plain(one.label))
    for _, step, _ in _fired(series):
        axes.axvline(step, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step")
    axes.set_ylabel(_plain(series[0].metric))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize="small")


def _plain(text: str) -> str:
    """A name escaped for matplotlib: a dollar sign would begin a formula, a leading `_` hides a label."""
    return text.replace("$", r"\$").lstrip("_") or text


def _metadata(path: Path) -> dict[str, None]:
    """Metadata without a date, so that the same curves give the same bytes."""
    return {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower(), {})
