"""Pictures for the pages: curves of runs, and the verdicts of every step, as SVG.

There is no script and no style in a picture: its colours are the page's classes `c0` to `c7`, so that they
follow a dark page, and the policy on content forbids what other libraries draw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from srl.browse.curve import Series
from srl.browse.plot import round_digits, round_ticks
from srl.store.verdict import VERDICTS

OVERVIEW = ("val/em", "test/em", "critic/score/mean", "response_length/mean")
PANELS = (
    *OVERVIEW, "env/number_of_valid_search", "env/finish_ratio", "actor/entropy", "actor/ppo_kl",
    "actor/grad_norm", "timing_s/step",
)  # fmt: skip
"""The metrics that are drawn of all runs, and of one."""

_COLOURS, _MOST = 8, 3
_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 10, 26
_POINTS, _MARKED = 400, 40
"""Points of a line at most, and those of a line whose points are marked."""

_VERDICTS = dict(zip(VERDICTS, ("c2", "c1", "c0", "c3", "c6", "c4", "c5", "c7"), strict=True))
"""The colour of each verdict: green for correct, red for a failed search."""

Place = Callable[[float, float], str]
"""The point of a value at a step, as `x,y` in pixels."""


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of a chart's legend: its label, its colour's class, and what it is at the last step."""

    label: str
    colour: str
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture with its name and its legend."""

    name: str
    svg: Markup
    lines: list[Line]


def charts(panels: Mapping[str, Sequence[Series]], configs: Mapping[str, str] | None = None) -> list[Chart]:
    """A chart for each metric of `panels`.

    With `configs`, the configurations of runs as JSON, runs that differ in their seed alone share a colour:
    each is a thin line, and the mean of all a thick one, in a band from the lowest to the highest.
    """
    return [_curves(name, _by_seed(series, configs or {})) for name, series in panels.items() if series]


def verdict_charts(shares: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[float]]]]) -> list[Chart]:
    """A chart for each phase: the shares of the verdicts over its steps, one on top of another."""
    found = []
    for phase, (steps, by_verdict) in shares.items():
        axes, at = _frame((steps[0], steps[-1]), (0.0, 1.0))
        base, areas, lines = [0.0] * len(steps), "", []
        for verdict, values in by_verdict.items():
            top = [low + value for low, value in zip(base, values, strict=True)]
            across = [*map(at, steps, top)] or [""]
            back = [*map(at, steps, base)][::-1]
            if len(steps) == 1:  # one step has no width of its own
                across, back = [across[0], at(steps[0] + 1, top[0])], [at(steps[0] + 1, base[0]), back[0]]
            areas += f'<polygon class="area {_VERDICTS[verdict]}" points="{" ".join([*across, *back])}"/>'
            lines.append(Line(verdict, _VERDICTS[verdict], f"{values[-1]:.0%} at step {steps[-1]}"))
            base = top
        found.append(_chart(f"verdicts, {phase}", areas + axes, lines))
    return found


@dataclass(frozen=True, slots=True)
class _Band:
    label: str
    runs: list[Series]


def _curves(name: str, bands: Sequence[_Band]) -> Chart:
    every = [one for band in bands for one in band.runs]
    values = [value for one in every for value in one.values]
    ticks = round_ticks(min(values), max(values), 4)
    axes, at = _frame(
        (min(one.steps[0] for one in every), max(one.steps[-1] for one in every)), (ticks[0], ticks[-1])
    )
    drawn, lines = "", []
    for place, band in enumerate(bands):
        colour, several = f"c{place % _COLOURS}", len(band.runs) > 1
        parts = [
            _line(at, one.steps, one.values, "run" if several else "mean", one.label) for one in band.runs
        ]
        by_step = [dict(zip(one.steps, one.values, strict=True)) for one in band.runs]
        steps = sorted(set.intersection(*map(set, by_step)))
        last = f"{band.runs[0].values[-1]:.3f} at step {band.runs[0].steps[-1]}"
        if several and steps:
            found = [[one[step] for one in by_step] for step in steps]
            mean, low, high = ([pick(one) for one in found] for pick in (_mean, min, max))
            outline = [*map(at, steps, high), *reversed([*map(at, steps, low)])]
            parts.insert(0, f'<polygon class="band" points="{" ".join(outline)}"/>')
            parts.append(_line(at, steps, mean, "mean", f"{band.label}, mean"))
            last = f"{mean[-1]:.3f} at step {steps[-1]} ({low[-1]:.3f} to {high[-1]:.3f})"
        drawn += f'<g class="{colour}">{"".join(parts)}</g>'
        lines.append(Line(band.label, colour, last))
    return _chart(name, axes + drawn, lines)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _chart(name: str, inside: str, lines: list[Line]) -> Chart:
    label = escape(f"{name}. {'; '.join(f'{line.label}: {line.last}' for line in lines)}", quote=True)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return Chart(name, Markup(f'<svg class="chart" {box}>{inside}</svg>'), lines)


def _frame(steps: tuple[int, int], values: tuple[float, float]) -> tuple[str, Place]:
    """Grid lines with their values and the first and last step, and the place of a value at a step."""
    (first, last), (low, high) = steps, values
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def xy(step: float, value: float) -> tuple[float, float]:
        right, up = (step - first) / max(last - first, 1), (value - low) / (high - low)
        return _LEFT + right * width, _TOP + (1 - up) * height

    ticks = round_ticks(low, high, 4)
    text = ""
    for tick in ticks:
        _, y = xy(first, tick)
        text += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        name = f"{tick:.{round_digits(ticks)}f}"
        text += f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>'
    below = ((_LEFT, "start", first), (_LEFT + width / 2, "middle", "step"), (_LEFT + width, "end", last))
    for x, anchor, what in below:
        text += f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{what}</text>'
    return text, lambda step, value: "{:.1f},{:.1f}".format(*xy(step, value))


def _line(at: Place, steps: Sequence[int], values: Sequence[float], kind: str, label: str) -> str:
    points = _thinned(list(zip(steps, values, strict=True)))
    line = f'<polyline class="{kind}" points="{" ".join(at(*point) for point in points)}"/>'
    if kind == "run" or len(points) > _MARKED:
        return line
    for step, value in points:
        x, _, y = at(step, value).partition(",")
        title = escape(f"{label}: {value:.4g} at step {step}")
        line += f'<circle cx="{x}" cy="{y}" r="3"><title>{title}</title></circle>'
    return line


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """About `_POINTS` of the points: of each stretch its lowest and highest, so that no peak is lost."""
    if len(points) <= _POINTS:
        return list(points)
    cuts = [round(n * len(points) / (_POINTS // 2)) for n in range(_POINTS // 2 + 1)]
    kept: list[tuple[int, float]] = []
    for start, stop in pairwise(cuts):
        stretch = points[start:stop]
        kept += sorted({pick(stretch, key=lambda point: point[1]) for pick in (min, max)})
    return kept


def _by_seed(series: Sequence[Series], configs: Mapping[str, str]) -> list[_Band]:
    """The runs of one metric, those whose configuration is equal but for the seed together.

    A band of one run has its name; one of several its name without seed and number, and where several bands
    would be called alike, the keys that differ.
    """
    flat = {run_id: _settings(json.loads(config)) for run_id, config in configs.items()}
    groups: dict[tuple[str, str], list[Series]] = {}
    for one in series:
        settings = flat.get(one.run_id)
        same = one.run_id if settings is None else json.dumps(settings, sort_keys=True)
        groups.setdefault((same, one.phase), []).append(one)
    labels = [_label(runs) for runs in groups.values()]
    bands = []
    for label, runs in zip(labels, groups.values(), strict=True):
        alike = [
            flat.get(other[0].run_id, {})
            for name, other in zip(labels, groups.values(), strict=True)
            if name == label
        ]
        own = flat.get(runs[0].run_id, {})
        differ = [key for key in own if any(config.get(key) != own[key] for config in alike)][:_MOST]
        keys = ", ".join(f"{key.rpartition('.')[2]} {own[key]}" for key in differ)
        bands.append(_Band(f"{label} ({keys})" if keys else label, runs))
    return bands


def _label(runs: Sequence[Series]) -> str:
    if len(runs) == 1:
        return runs[0].label
    name, _, phase = runs[0].label.partition(" ")
    return f"{name.rsplit('-s', 1)[0]}, {len(runs)} seeds{f' {phase}' if phase else ''}"


def _settings(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """The settings by their dotted keys, without the seed and without what a resumed run changed."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and f"{before}{key}" not in ("changed", "extended"):
            flat |= _settings(value, f"{before}{key}.")
        elif f"{before}{key}" not in ("trainer.seed", "changed", "extended"):
            flat[f"{before}{key}"] = value
    return flat
