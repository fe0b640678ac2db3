"""Figures that say how far to trust a mean: intervals, and pass@k without bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000


class Interval(NamedTuple):
    """Two-sided confidence interval of a mean."""

    low: float
    high: float


def wilson_interval(successes: float, trials: int, confidence: float = 0.95) -> Interval:
    """The score interval of a share; it stays within 0 and 1 and is not empty at either end.

        (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson (1927), Probable inference, the law of succession, and statistical inference.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = successes / trials, 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink))


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95, seed: int = 0) -> Interval:
    """The percentile interval of the mean of `values` over 1,000 resamples; the same for a seed.

    Source: Efron and Tibshirani (1993), An introduction to the bootstrap, chapter 13.
    """
    sample, random = np.asarray(values, dtype=float), np.random.default_rng(seed)
    means = [sample[random.integers(len(sample), size=len(sample))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that one of `k` samples drawn from these is correct: 1 - C(n-c, k) / C(n, k).

    Source: Chen et al. (2021), arXiv 2107.03374, equation 1. Raises ValueError unless 1 ≤ k ≤ samples.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples: k must be between 1 and the samples")
    return 1.0 - comb(samples - correct, k) / comb(samples, k)
