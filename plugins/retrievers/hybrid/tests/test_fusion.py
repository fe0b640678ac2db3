"""Reciprocal-rank fusion against numbers worked out by hand, and what must hold of any rankings."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srl_hybrid.fusion import best, fuse

EQUAL = {"a": 1.0, "b": 1.0, "c": 1.0}


def test_scores_are_those_worked_out_by_hand():
    scores = fuse({"a": ["x", "y"], "b": ["y", "z"]}, EQUAL, 60)
    # x: 1/61; y: 1/62 + 1/61; z: 1/62
    assert scores == pytest.approx({"x": 0.01639344, "y": 0.03252247, "z": 0.01612903}, abs=1e-8)
    assert best(scores, 2, ord) == ["y", "x"]


ranking = st.permutations("pqrstuvw").flatmap(lambda ids: st.integers(0, 8).map(lambda size: ids[:size]))
rankings = st.fixed_dictionaries({"a": ranking, "b": ranking, "c": ranking})
weight = st.floats(0.01, 100)
weights = st.fixed_dictionaries({"a": weight, "b": weight, "c": weight})
constant = st.integers(0, 1000)


@given(rankings, weights, constant)
def test_scores_are_the_exact_sums_rounded(found, weights, constant):
    for name, score in fuse(found, weights, constant).items():
        shares = [
            Fraction(weights[key] / (constant + ids.index(name) + 1))
            for key, ids in found.items()
            if name in ids
        ]
        assert score == float(sum(shares))
        assert score > 0


@given(rankings, weights, constant, st.integers(1, 8))
def test_what_is_not_fused_follows_by_its_best_rank_with_a_lower_score(found, weights, constant, depth):
    first = fuse({name: ids[:depth] for name, ids in found.items()}, weights, constant)
    scores = fuse(found, weights, constant, depth)
    assert {name: scores[name] for name in first} == first
    rest = {name: score for name, score in scores.items() if name not in first}
    assert set(scores) == {name for ids in found.values() for name in ids}
    assert all(0 < score <= min(first.values()) for score in rest.values())
    ranks = {name: min(ids.index(name) for ids in found.values() if name in ids) for name in rest}
    order = [ranks[name] for name in sorted(rest, key=lambda name: -rest[name])]
    assert order == sorted(order)
