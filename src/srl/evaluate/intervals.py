"""Figures that say how far to trust a mean: intervals, and pass@k without bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean, variance
from typing import NamedTuple


class Interval(NamedTuple):
    """Two-sided confidence interval of a mean."""

    low: float
    high: float


def wilson_interval(share: float, trials: float, confidence: float = 0.95) -> Interval:
    """The score interval of a share of `trials`; it stays within 0 and 1 and is not empty at either end.

        (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson (1927), Probable inference, the law of succession, and statistical inference.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    shrink = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink))


def clustered_interval(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """Wilson's interval of a share whose trials come in groups of like ones; a group counts as a whole.

    The number of trials is the one that would give the variance seen between the groups' means,

        n = p(1-p) / (s² / groups),  at most all trials, and as many as there are groups for p = 0 or 1

    so that groups of one give Wilson's own. Source: Dean and Pagano (2015), Evaluating confidence
    interval methods for binomial proportions in clustered surveys.
    """
    means, trials = [fmean(group) for group in groups], sum(map(len, groups))
    share = fmean(means)
    if trials == len(groups) or len(groups) == 1 or share in (0.0, 1.0):
        return wilson_interval(share, len(groups), confidence)
    seen = variance(means) / len(groups)
    effective = min(share * (1 - share) / seen, trials) if seen else trials
    return wilson_interval(share, effective, confidence)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of `k` samples drawn from these is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, equation 1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
