"""Reciprocal-rank fusion of several rankings (Cormack, Clarke and Büttcher 2009)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from math import fsum


def fuse(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float], rank_constant: int, depth: int = 100
) -> dict[str, float]:
    """The fused score of every id in `rankings`, each a list of ids, best first.

        score(p) = Σ over the rankings r that contain p:  w_r / (k + rank_r(p)),  ranks from 1

    Only the first `depth` of each ranking are fused; the ids after them follow by their best rank, so the
    first ids do not depend on how long the rankings are. The sums are exactly rounded, so they do not depend
    on the order of the rankings. If an id occurs twice in a ranking, its first rank counts.
    """
    shares: dict[str, list[float]] = {}
    for name, ranking in rankings.items():
        for rank, passage_id in enumerate(dict.fromkeys(ranking[:depth]), start=1):
            shares.setdefault(passage_id, []).append(weights[name] / (rank_constant + rank))
    tails = zip_longest(*(rankings[name][depth:] for name in sorted(rankings)))
    tail = (passage_id for ranks in tails for passage_id in ranks if passage_id is not None)
    return followed_by({passage_id: fsum(parts) for passage_id, parts in shares.items()}, tail)


def followed_by(scores: Mapping[str, float], tail: Iterable[str]) -> dict[str, float]:
    """`scores`, all above 0, and `tail` after the lowest of them, in their order, with lower scores."""
    lowest = min(scores.values(), default=1.0)
    ids = (passage_id for passage_id in dict.fromkeys(tail) if passage_id not in scores)
    return {**scores, **{passage_id: lowest / (1 + place) for place, passage_id in enumerate(ids, start=1)}}


def best(scores: Mapping[str, float], k: int, place: Callable[[str], int]) -> list[str]:
    """The `k` ids with the highest scores. Ties are sorted by `place`, which is called for tied ids only."""
    ids: list[str] = []
    for _, group in groupby(sorted(scores, key=scores.__getitem__, reverse=True), key=scores.__getitem__):
        tied = list(group)
        ids += tied if len(tied) == 1 else sorted(tied, key=place)
        if len(ids) >= k:
            break
    return ids[:k]
