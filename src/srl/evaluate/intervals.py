"""How far to trust a mean: confidence intervals (Wilson, clustered, bootstrap) and a paired test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import sqrt
from statistics import NormalDist, fmean, variance
from typing import Any, NamedTuple

import numpy as np

from srl.errors import UserError

_RESAMPLES = 2000
_BATCH = 1 << 22
"""Resampled values held in memory at a time."""
_PERMUTATIONS = 9999


class Interval(NamedTuple):
    """Two-sided confidence interval of a mean."""

    low: float
    high: float


def wilson_interval(share: float, trials: float, confidence: float = 0.95) -> Interval:
    """The score interval of a share of `trials`. It stays within 0 and 1 and has a width at both ends.

        (p + z²/2n ± z·√(p(1-p)/n + z²/4n²)) / (1 + z²/n)

    Source: Wilson (1927), Probable inference, the law of succession, and statistical inference.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    shrink = 1 + z * z / trials
    centre = share + z * z / (2 * trials)
    half = z * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Interval(max(0.0, (centre - half) / shrink), min(1.0, (centre + half) / shrink))


def clustered_interval(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Interval:
    """Wilson's interval of a share whose trials come in correlated groups (samples of one question, say).

    The effective number of trials is the one that gives the observed variance of the groups' means,

        n = p(1-p) / (s² / groups),  at most all trials, and the number of groups for p = 0 or 1

    so groups of one give Wilson's interval. Source: Dean and Pagano (2015), Evaluating confidence interval
    methods for binomial proportions in clustered surveys.
    """
    means, trials = [fmean(group) for group in groups], sum(map(len, groups))
    share = fmean(means)
    if trials == len(groups) or len(groups) == 1 or share in (0.0, 1.0):
        return wilson_interval(share, len(groups), confidence)
    seen = variance(means) / len(groups)
    effective = min(share * (1 - share) / seen, trials) if seen else trials
    return wilson_interval(share, effective, confidence)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of a measure over questions, and its interval (NaN where there is one question)."""

    mean: float
    low: float
    high: float


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """The mean over questions, with Wilson's interval where all values are 0 or 1, else the bootstrap's."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, float("nan"), float("nan"))
    if set(values) <= {0.0, 1.0}:
        return Estimate(mean, *wilson_interval(mean, len(values), confidence))
    return Estimate(mean, *bootstrap_interval(values, confidence))


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The percentile interval of the mean, from 2,000 bootstrap samples; the same in every run."""
    result = imported("scipy.stats").bootstrap(
        (np.asarray(values, float),),
        np.mean,
        axis=-1,
        n_resamples=_RESAMPLES,
        batch=max(_BATCH // len(values), 1),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return Interval(*map(float, result.confidence_interval))


def paired_p(changes: Sequence[float]) -> float:
    """The two-sided p-value of the mean change, by Fisher's randomisation test: signs are swapped at random.

    Smucker, Allan and Carterette (2007) recommend it for comparing retrievers. All swaps are tried where
    there are few questions, else 9,999. The value is 1 where fewer than two questions changed.
    """
    moved = np.array([change for change in changes if change])
    if len(moved) < 2:
        return 1.0
    result = imported("scipy.stats").permutation_test(
        (moved, np.zeros_like(moved)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=_PERMUTATIONS,
        batch=1000,
        vectorized=True,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)


def imported(name: str) -> Any:
    """A library of the extra `ir`. Raises UserError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"measuring an index needs {name.partition('.')[0]}; type: pip install 'srl-search[ir]'"
        ) from error
