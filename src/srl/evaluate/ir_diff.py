"""Where two rankings of the same questions differ, and whether one is better than chance would make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from srl.evaluate.retrieval_metrics import Figure, bootstrap_interval, figure, imported

PERSISTENCE = 0.9
"""How far down a reader of rank-biased overlap looks: the first ten ranks carry 86% of the weight."""

_SAMPLES = 9999


@dataclass(frozen=True, slots=True)
class Difference:
    """How two rankings of one question differ in their first k."""

    question: str
    overlap: float
    rbo: float
    same_first: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of A and of B over the same questions: B - A, its interval, and a paired test's p."""

    a: Figure
    b: Figure
    change: Figure
    better: int
    worse: int
    p: float


def difference(
    question: str, a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]], k: int
) -> Difference:
    """Compare the first `k` of two lists of (passage, score)."""
    ids_a, ids_b = ([passage for passage, _ in hits[:k]] for hits in (a, b))
    return Difference(question, overlap_at(a, b, k), rank_biased_overlap(ids_a, ids_b), _same_first(a, b))


def overlap_at(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]], k: int) -> float:
    """The share of passages that two lists have in common among their first `k`, ties being pooled.

    Where a list is cut among passages of one score, which of them are in is chance, so that they stand in
    for each other: a passage counts as common when the other list has it, or holds it in the tie at its
    own cut (the lists may reach beyond `k` to show one). Two empty lists are the same.
    """
    first_a, first_b = (list(dict.fromkeys(name for name, _ in hits[:k])) for hits in (a, b))
    longer = max(len(first_a), len(first_b))
    if not longer:
        return 1.0
    from_a = len(set(first_a) & _with_ties(b, k))
    from_b = len(set(first_b) & _with_ties(a, k))
    return min(max(from_a, from_b), longer) / longer


def _with_ties(hits: Sequence[tuple[str, float]], k: int) -> set[str]:
    """The first `k`, and those after them with the score of the last."""
    if len(hits) <= k:
        return {name for name, _ in hits}
    cut = hits[k - 1][1]
    return {name for place, (name, score) in enumerate(hits) if place < k or score == cut}


def rank_biased_overlap(a: Sequence[str], b: Sequence[str], persistence: float = PERSISTENCE) -> float:
    """How alike two rankings are, the top counting most: 1 for the same list, 0 for nothing in common.

        RBO = (1 - p) Σ_{d=1..k} p^(d-1) |A_d ∩ B_d| / d  +  p^k |A_k ∩ B_k| / k

    with the first d of each as A_d and B_d; the second term lets the lists go on as they end. A list that
    ends before the other stays as it is, and the larger of the two sets takes the place of d. Source: Webber,
    Moffat and Zobel (2010), A similarity measure for indefinite rankings (there, RBO_EXT).
    """
    k = max(len(a), len(b))
    if not k:
        return 1.0
    seen_a: set[str] = set()
    seen_b: set[str] = set()
    total = agreement = 0.0
    for depth in range(1, k + 1):
        seen_a.update(a[depth - 1 : depth])
        seen_b.update(b[depth - 1 : depth])
        agreement = len(seen_a & seen_b) / max(len(seen_a), len(seen_b))
        total += persistence ** (depth - 1) * agreement
    return (1 - persistence) * total + persistence**k * agreement


def _same_first(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> bool:
    """Whether the best passage is the same, or a tie holds the other's; also where neither has any."""
    if not (a and b):
        return not (a or b)
    return a[0][0] in _with_ties(b, 1) or b[0][0] in _with_ties(a, 1)


def compare(a: Mapping[str, float], b: Mapping[str, float]) -> Comparison:
    """One measure of two indexes on the questions that both were measured on."""
    names = [name for name in a if name in b]
    changes = [b[name] - a[name] for name in names]
    return Comparison(
        figure([a[name] for name in names]),
        figure([b[name] for name in names]),
        _change(changes),
        sum(change > 0 for change in changes),
        sum(change < 0 for change in changes),
        paired_p(changes),
    )


def _change(changes: Sequence[float]) -> Figure:
    """Their mean with the bootstrap's interval."""
    if len(changes) < 2:
        return Figure(fmean(changes), float("nan"), float("nan"))
    return Figure(fmean(changes), *bootstrap_interval(changes))


def paired_p(changes: Sequence[float]) -> float:
    """How often chance alone would make the mean change this large: both sides, signs swapped at random.

    Fisher's randomisation test, as Smucker, Allan and Carterette (2007) recommend for comparing retrievers.
    Every way of swapping where there are few questions, else 9,999 of them; 1 where a single one changed,
    or none.
    """
    moved = np.array([change for change in changes if change])
    if len(moved) < 2:
        return 1.0
    result = imported("scipy.stats").permutation_test(
        (moved, np.zeros_like(moved)),
        lambda x, y, axis: np.mean(x - y, axis=axis),
        permutation_type="samples",
        n_resamples=_SAMPLES,
        batch=1000,
        vectorized=True,
        alternative="two-sided",
        rng=np.random.default_rng(0),
    )
    return float(result.pvalue)
