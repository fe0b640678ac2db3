"""Paired tests of two systems on the same questions, and Holm's correction for several of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from srl.evaluate.intervals import Interval, cluster_numbers, difference_interval

_PERMUTATIONS = 9999
_EXACT = 13
"""Clusters that changed, up to which all 2^n swaps are tried."""
_AT_ONCE = 1 << 22
"""Numbers drawn at a time."""


@dataclass(frozen=True, slots=True)
class PairedTest:
    """B - A on the same questions: the mean, its interval (None: too few clusters), the two-sided p-value."""

    difference: float
    interval: Interval | None
    p: float


def paired_test(
    a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> PairedTest:
    """Compare B with A, both with one value in [0, 1] for each question, in the same order.

    `clusters` names for each question the document that it depends on. Raises ValueError for lists of
    different lengths.
    """
    if not len(a) == len(b) > 0:
        raise ValueError(f"{len(a)} and {len(b)} values: expected those of the same questions")
    changes = [later - earlier for earlier, later in zip(a, b, strict=True)]
    return PairedTest(
        float(np.mean(changes)), difference_interval(changes, clusters), paired_p(changes, clusters)
    )


def paired_p(changes: Sequence[float], clusters: Sequence[Hashable] | None = None) -> float:
    """The two-sided p-value of the mean change, by Fisher's randomisation test: signs are swapped at random.

    The changes of a cluster are swapped together. For changes of -1, 0 and 1 without clusters this is
    McNemar's exact test. All swaps are tried where few clusters changed, else 9,999 at random, the same in
    every run. It keeps its level with any number of clusters. Smucker, Allan and Carterette (2007) recommend
    it for comparing retrievers.
    """
    values = np.asarray(changes, float)
    sums = values if clusters is None else np.bincount(cluster_numbers(clusters), values)
    sizes, counts = np.unique(np.abs(sums).round(9), return_counts=True)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    reached = abs(float(sums.sum())) - 1e-6
    if counts.sum() <= _EXACT:
        return float((np.abs(_all_swaps(np.repeat(sizes, counts))) >= reached).mean())
    return (1 + _random_swaps(sizes, counts, reached)) / (1 + _PERMUTATIONS)


def _all_swaps(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sum for every choice of signs, (2^n,)."""
    totals = np.zeros(1)
    for size in sizes:
        totals = np.concatenate((totals - size, totals + size))
    return totals


def _random_swaps(sizes: NDArray[np.float64], counts: NDArray[np.int64], reached: float) -> int:
    """How many of the random choices of signs give a sum of `reached` or more, in either direction.

    Of `counts` equal sizes only the number with a positive sign matters, which is binomial.
    """
    rng, extremes, remaining = np.random.default_rng(0), 0, _PERMUTATIONS
    while remaining:
        rows = min(remaining, max(_AT_ONCE // len(sizes), 1))
        positive = rng.binomial(counts, 0.5, (rows, len(sizes)))
        extremes += int((np.abs((2 * positive - counts) @ sizes) >= reached).sum())
        remaining -= rows
    return extremes


def holm(ps: Sequence[float]) -> list[float]:
    """P-values corrected for their number, in the order given: all below 0.05 are wrong in 5% of tables.

        p_(i) = max_{j ≤ i} min(1, (m - j + 1) p_(j)),   p_(1) ≤ … ≤ p_(m)

    Source: Holm (1979), A simple sequentially rejective multiple test procedure.
    """
    corrected, worst = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        worst = max(worst, min(1.0, (len(ps) - rank) * ps[place]))
        corrected[place] = worst
    return corrected
