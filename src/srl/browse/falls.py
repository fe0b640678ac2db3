"""Where a series over steps falls: its level before, its level after, and the step between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite, sqrt
from statistics import fmean, median

FEWEST = 8
"""Steps below which no fall is looked for."""
LEAST = 0.05
"""The smallest fall of a share that counts."""
SHARE = 0.15
"""A fall is at least this share of the highest level."""
NOISES = 4.0
"""A fall is at least so many standard errors of a level; the highest of many levels is high by chance."""
LONGEST = 20
"""Steps before and after a fall that are compared at most."""


@dataclass(frozen=True, slots=True)
class Fall:
    """A fall from `high` to `low`; `since` is the first step of the lower level.

    `before` and `after` are the steps that are compared: up to `LONGEST` on either side.
    """

    since: int
    high: float
    low: float
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def size(self) -> float:
        return self.high - self.low


def fall(steps: Sequence[int], values: Sequence[float]) -> Fall | None:
    """The fall from the highest level of `values` to the last one; None if there is none, or too few steps.

    A level is the mean of `level_window` steps. The step is where two levels fit best what follows the
    highest one.
    """
    window = level_window(values)
    if len(values) < FEWEST:
        return None
    levels = [fmean(values[at : at + window]) for at in range(len(values) - window + 1)]
    highest = max(range(len(levels)), key=levels.__getitem__)
    high, low = levels[highest], levels[-1]
    error = noise(values) / sqrt(window)
    if high - low < max(LEAST, SHARE * high, NOISES * error):
        return None
    start = highest
    at = start + change_point(values[start:])
    before, after = steps[max(0, at - LONGEST) : at], steps[at:][-LONGEST:]
    return Fall(steps[at], high, low, tuple(before), tuple(after))


def level_window(values: Sequence[float]) -> int:
    """How many values a level is the mean of: a tenth of them, 3 at least."""
    return max(3, len(values) // 10)


def change_point(values: Sequence[float]) -> int:
    """The index from 1 at which two levels, before it and from it on, leave the smallest squared error."""
    total, squares = sum(values), sum(value * value for value in values)
    best, found, left = float("inf"), 1, 0.0
    for at in range(1, len(values)):
        left += values[at - 1]
        right = total - left
        error = squares - left * left / at - right * right / (len(values) - at)
        if error < best:
            best, found = error, at
    return found


def noise(values: Sequence[float]) -> float:
    """The standard deviation of a step around its level, from the median change between neighbours.

    Source: the difference-based estimator of Rice (1984), with the median for its mean.
    """
    changes = [abs(later - earlier) for earlier, later in pairwise(values)]
    return median(changes) / 0.6745 / sqrt(2) if changes else 0.0


def rise(values: Sequence[float]) -> bool:
    """Whether the last third lies above the first by more than two standard errors of their difference."""
    if len(values) < FEWEST:
        return False
    third = max(3, len(values) // 3)
    grown = fmean(values[-third:]) - fmean(values[:third])
    return grown > max(0.02, 2 * noise(values) * sqrt(2 / third))


def level(series: dict[int, float], steps: Sequence[int]) -> float | None:
    """The median of a series at these steps, of its finite values; None without any."""
    known = [series[step] for step in steps if step in series and isfinite(series[step])]
    return median(known) if known else None
