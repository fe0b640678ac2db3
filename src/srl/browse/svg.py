"""Curves as SVG for a page: no script and no style in it, colours by the page's classes.

The pictures that matplotlib and other libraries draw carry styles of their own, which the page's policy on
content forbids, and their colours do not follow a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from srl.browse.curve import Series
from srl.browse.plot import round_digits, round_ticks

COLOURS = 8
"""Lines take the classes `c0` to `c7` in turn."""

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 26
_POINTS = 400
_MARKED = 40


@dataclass(frozen=True, slots=True)
class Band:
    """Runs that differ in their seed alone: each of `runs`, and where there are several, their mean.

    `steps` are those at which every run has a value, and `mean`, `low` and `high` the values there.
    """

    label: str
    runs: tuple[Series, ...]
    steps: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


def band(label: str, runs: Sequence[Series]) -> Band:
    """The mean, lowest and highest value of `runs` at the steps that all have."""
    by_step = [dict(zip(one.steps, one.values, strict=True)) for one in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    values = [[one[step] for one in by_step] for step in steps]
    return Band(
        label,
        tuple(runs),
        tuple(steps),
        tuple(sum(each) / len(each) for each in values),
        tuple(map(min, values)),
        tuple(map(max, values)),
    )


def chart(title: str, bands: Sequence[Band]) -> str:
    """One metric over the steps as an `<svg>`: a colour for each band, its runs thin under their mean."""
    series = [one for each in bands for one in each.runs]
    frame = _Frame(series)
    parts = [frame.axes()]
    for place, each in enumerate(bands):
        parts.append(f'<g class="c{place % COLOURS}">{_drawn(frame, each)}</g>')
    said = "; ".join(f"{each.label}: {_last(each)}" for each in bands)
    label = escape(f"{title}. {said}", quote=True)
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def _last(each: Band) -> str:
    last = max(each.runs, key=lambda one: one.steps[-1])
    return f"{last.values[-1]:.4g} at step {last.steps[-1]}"


def _drawn(frame: _Frame, each: Band) -> str:
    several = len(each.runs) > 1
    text = ""
    if several and each.steps:
        there = [frame.at(*point) for point in zip(each.steps, each.high, strict=True)]
        back = [frame.at(*point) for point in zip(each.steps, each.low, strict=True)]
        text += f'<polygon class="band" points="{_points([*there, *reversed(back)])}"/>'
    for one in each.runs:
        text += _line(frame, one.steps, one.values, "run" if several else "mean", one.label)
    if several and each.steps:
        text += _line(frame, each.steps, each.mean, "mean", f"{each.label}, mean of {len(each.runs)}")
    return text


def _line(frame: _Frame, steps: Sequence[int], values: Sequence[float], kind: str, label: str) -> str:
    points = thinned(list(zip(steps, values, strict=True)))
    line = f'<polyline class="{kind}" points="{_points([frame.at(*point) for point in points])}"/>'
    if kind == "run" or len(points) > _MARKED:
        return line
    return line + "".join(_mark(frame, label, *point) for point in points)


def _mark(frame: _Frame, label: str, step: int, value: float) -> str:
    x, y = frame.at(step, value)
    title = escape(f"{label}: {value:.4g} at step {step}")
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{title}</title></circle>'


def thinned(points: Sequence[tuple[int, float]], most: int = _POINTS) -> list[tuple[int, float]]:
    """`points` with about `most` left: of each stretch its lowest and highest, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    cuts = [round(n * len(points) / (most // 2)) for n in range(most // 2 + 1)]
    kept: list[tuple[int, float]] = []
    for start, stop in pairwise(cuts):
        stretch = points[start:stop]
        low, high = (pick(stretch, key=lambda point: point[1]) for pick in (min, max))
        kept += sorted({low, high})
    return kept


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


class _Frame:
    """The place of steps and values in the picture, in its pixels."""

    def __init__(self, series: Sequence[Series]) -> None:
        values = [value for one in series for value in one.values]
        self._ticks = round_ticks(min(values), max(values), 4)
        self._low, self._high = self._ticks[0], self._ticks[-1]
        self._first = min(one.steps[0] for one in series)
        self._last = max(max(one.steps[-1] for one in series), self._first + 1)

    def at(self, step: float, value: float) -> tuple[float, float]:
        """The point of `value` at `step`."""
        right = (step - self._first) / (self._last - self._first)
        up = (value - self._low) / (self._high - self._low)
        width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
        return _LEFT + right * width, _TOP + (1 - up) * height

    def axes(self) -> str:
        """Grid lines with their values, and the first and last step."""
        digits = round_digits(self._ticks)
        text = ""
        for tick in self._ticks:
            _, y = self.at(self._first, tick)
            text += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            text += f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.{digits}f}</text>'
        for step, anchor in ((self._first, "start"), (self._last, "end")):
            x, _ = self.at(step, self._low)
            text += f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{step}</text>'
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        return f'{text}<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>'
