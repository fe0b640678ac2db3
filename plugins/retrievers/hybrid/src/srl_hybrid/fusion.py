"""Reciprocal-rank fusion of several rankings (Cormack, Clarke and Büttcher 2009)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import fsum


def fuse(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float], rank_constant: int
) -> dict[str, float]:
    """The fused score of every id in `rankings`, each a list of ids, best first.

        score(p) = Σ over the rankings r that contain p:  w_r / (k + rank_r(p)),  ranks from 1

    The sums are exactly rounded, so they do not depend on the order of the rankings. If an id occurs twice
    in a ranking, its first rank counts.
    """
    shares: dict[str, list[float]] = {}
    for name, ranking in rankings.items():
        for rank, passage_id in enumerate(dict.fromkeys(ranking), start=1):
            shares.setdefault(passage_id, []).append(weights[name] / (rank_constant + rank))
    return {passage_id: fsum(found) for passage_id, found in shares.items()}


def best(scores: Mapping[str, float], k: int, place: Callable[[str], int]) -> list[str]:
    """The `k` ids with the highest scores. Ties are sorted by `place`, which is called for tied ids only."""
    found: list[str] = []
    for _, tied in groupby(sorted(scores, key=lambda one: -scores[one]), key=scores.__getitem__):
        group = list(tied)
        found += group if len(group) == 1 else sorted(group, key=place)
        if len(found) >= k:
            break
    return found[:k]
