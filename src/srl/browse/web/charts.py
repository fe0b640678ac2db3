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
from math import ceil, floor, log10
from statistics import fmean

from markupsafe import Markup

from srl.browse.curve import Series
from srl.store.verdict import VERDICTS

OVERVIEW = ("val/em", "test/em", "critic/score/mean", "response_length/mean")
PANELS = (
    *OVERVIEW, "env/number_of_valid_search", "env/finish_ratio", "actor/entropy", "actor/ppo_kl",
    "actor/grad_norm", "timing_s/step",
)  # fmt: skip
"""The metrics that are drawn of all runs, and of one."""

_COLOURS, _POINTS, _MARKED = 8, 400, 40
"""Colours in turn, points of a line at most, and those of a line whose points are marked."""
_VERDICTS = dict(zip(VERDICTS, ("c2", "c1", "c0", "c3", "c6", "c4", "c5", "c7"), strict=True))
"""The colour of each verdict: green for correct, red for a failed search."""
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 480, 220, 56, 10, 10, 26
"""The picture and its margins in pixels."""

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


def verdict_charts(phases: Mapping[str, tuple[Sequence[int], Mapping[str, Sequence[float]]]]) -> list[Chart]:
    """A chart for each phase: the shares of the verdicts over its steps, one on top of another."""
    panels = []
    for phase, (steps, shares) in phases.items():
        axes, at = _frame(steps[0], steps[-1], [0.0, 0.25, 0.5, 0.75, 1.0])
        ends = steps if len(steps) > 1 else [steps[0], steps[0] + 1]  # one step has no width of its own
        base, areas, lines = [0.0] * len(ends), "", []
        for verdict, values in shares.items():
            top = [low + value for low, value in zip(base, [*values, values[-1]], strict=False)]
            outline = " ".join([*map(at, ends, top), *reversed([*map(at, ends, base)])])
            areas += f'<polygon class="area {_VERDICTS[verdict]}" points="{outline}"/>'
            lines.append(Line(verdict, _VERDICTS[verdict], f"{values[-1]:.0%} at step {steps[-1]}"))
            base = top
        panels.append(_chart(f"verdicts, {phase}", areas + axes, lines))
    return panels


def _curves(name: str, bands: Mapping[str, Sequence[Series]]) -> Chart:
    """A chart of `bands`: by their labels, runs that are drawn in one colour."""
    all_runs = [run for runs in bands.values() for run in runs]
    values = [value for run in all_runs for value in run.values]
    axes, at = _frame(
        min(run.steps[0] for run in all_runs),
        max(run.steps[-1] for run in all_runs),
        _ticks(min(values), max(values)),
    )
    groups, lines = "", []
    for place, (label, runs) in enumerate(bands.items()):
        several = len(runs) > 1
        parts = [_line(at, run.steps, run.values, "run" if several else "mean", run.label) for run in runs]
        last = f"{runs[0].values[-1]:.3f} at step {runs[0].steps[-1]}"
        by_step = [dict(zip(run.steps, run.values, strict=True)) for run in runs]
        steps = sorted(set.intersection(*map(set, by_step)))
        if several and steps:
            columns = [[points[step] for points in by_step] for step in steps]
            mean, low, high = ([pick(column) for column in columns] for pick in (fmean, min, max))
            outline = " ".join([*map(at, steps, high), *reversed([*map(at, steps, low)])])
            parts.insert(0, f'<polygon class="band" points="{outline}"/>')
            parts.append(_line(at, steps, mean, "mean", f"{label}, mean"))
            last = f"{mean[-1]:.3f} at step {steps[-1]} ({low[-1]:.3f} to {high[-1]:.3f})"
        groups += f'<g class="c{place % _COLOURS}">{"".join(parts)}</g>'
        lines.append(Line(label, f"c{place % _COLOURS}", last))
    return _chart(name, axes + groups, lines)


def _chart(name: str, inside: str, lines: list[Line]) -> Chart:
    label = escape(f"{name}. {'; '.join(f'{line.label}: {line.last}' for line in lines)}", quote=True)
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return Chart(name, Markup(f'<svg class="chart" {box}>{inside}</svg>'), lines)


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers, at least two, that cover `low` to `high`: 1, 2, 2.5 or 5 times 10ⁿ apart."""
    if max(abs(low), abs(high)) < 1e-300:  # ticks between such numbers are 0
        low, high = 0.0, 1.0
    elif low == high:
        low, high = low - abs(low) * 0.1, high + abs(low) * 0.1
    power = 10.0 ** floor(log10((high - low) / 4))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= (high - low) / 4 * 0.999)
    return [step * n for n in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


def _frame(first: int, last: int, ticks: Sequence[float]) -> tuple[str, Place]:
    """Grid lines at the ticks, the first and the last step, and the place of a value at a step."""
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def at(step: float, value: float) -> str:
        right, up = (step - first) / max(last - first, 1), (value - ticks[0]) / (ticks[-1] - ticks[0])
        return f"{_LEFT + right * width:.1f},{_TOP + (1 - up) * height:.1f}"

    text = ""
    for tick in ticks:
        y = float(at(first, tick).partition(",")[2])
        text += f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        text += f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>'
    below = ((_LEFT, "start", first), (_LEFT + width / 2, "middle", "step"), (_LEFT + width, "end", last))
    for x, anchor, what in below:
        text += f'<text x="{x}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{what}</text>'
    return text, at


def _line(at: Place, steps: Sequence[int], values: Sequence[float], kind: str, label: str) -> str:
    points = list(zip(steps, values, strict=True))
    if len(points) > _POINTS:  # of each stretch its lowest and highest, so that no peak is lost
        cuts = [round(n * len(points) / (_POINTS // 2)) for n in range(_POINTS // 2 + 1)]
        stretches = [sorted(points[start:stop], key=lambda point: point[1]) for start, stop in pairwise(cuts)]
        points = [point for stretch in stretches for point in sorted({stretch[0], stretch[-1]})]
    line = f'<polyline class="{kind}" points="{" ".join(at(*point) for point in points)}"/>'
    if kind == "run" or len(points) > _MARKED:
        return line
    for step, value in points:
        x, _, y = at(step, value).partition(",")
        title = escape(f"{label}: {value:.4g} at step {step}")
        line += f'<circle cx="{x}" cy="{y}" r="3"><title>{title}</title></circle>'
    return line


def _by_seed(series: Sequence[Series], configs: Mapping[str, str]) -> dict[str, list[Series]]:
    """The runs of one metric by label, those whose configuration is equal but for the seed together."""
    groups: dict[tuple[str, str], list[Series]] = {}
    for run in series:
        config = configs.get(run.run_id)
        groups.setdefault((_setting(config) if config else run.run_id, run.phase), []).append(run)
    return {
        runs[0].label + (f" and {len(runs) - 1} more seeds" if len(runs) > 1 else ""): runs
        for runs in groups.values()
    }


def _setting(config: str) -> str:
    """A configuration as JSON, without the seed and without what a resumed run changed."""
    settings = json.loads(config)
    kept = {name: section for name, section in settings.items() if name not in ("changed", "extended")}
    trainer = {key: value for key, value in settings.get("trainer", {}).items() if key != "seed"}
    return json.dumps(kept | {"trainer": trainer}, sort_keys=True)
