"""Reciprocal-rank fusion of several rankings (Cormack, Clarke and Büttcher 2009)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby, zip_longest
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


def fuse_first(
    rankings: Mapping[str, Sequence[str]], weights: Mapping[str, float], rank_constant: int, depth: int
) -> dict[str, float]:
    """The scores of `fuse` for the first `depth` of each ranking; the ids after them follow by best rank.

    So the first ids do not depend on how long the rankings are.
    """
    first = {name: ranking[:depth] for name, ranking in rankings.items()}
    rest = (rankings[name][depth:] for name in sorted(rankings))
    others = chain.from_iterable(zip_longest(*rest))
    return followed_by(fuse(first, weights, rank_constant), (one for one in others if one is not None))


def followed_by(scores: Mapping[str, float], others: Iterable[str]) -> dict[str, float]:
    """`scores`, all above 0, and `others` after the lowest of them, in their order, with lower scores.

    What is fused or reranked does not depend on how many hits a search requests: the rest follows.
    """
    lowest = min(scores.values(), default=1.0)
    rest = (one for one in dict.fromkeys(others) if one not in scores)
    return {**scores, **{one: lowest / (1 + place) for place, one in enumerate(rest, start=1)}}


def best(scores: Mapping[str, float], k: int, place: Callable[[str], int]) -> list[str]:
    """The `k` ids with the highest scores. Ties are sorted by `place`, which is called for tied ids only."""
    found: list[str] = []
    for _, tied in groupby(sorted(scores, key=lambda one: -scores[one]), key=scores.__getitem__):
        group = list(tied)
        found += group if len(group) == 1 else sorted(group, key=place)
        if len(found) >= k:
            break
    return found[:k]
