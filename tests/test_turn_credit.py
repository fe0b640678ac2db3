"""The decision process of bench/turn_credit.py: whose gradient is the return's, and whose is not."""

from __future__ import annotations

import json

import pytest
from bench.turn_credit import ESTIMATORS, POLICIES, RESULT, Process, table
from torch.testing import assert_close


@pytest.fixture(scope="module", params=POLICIES)
def process(request):
    return Process(POLICIES[request.param])


def test_the_probabilities_of_all_episodes_and_of_all_groups_sum_to_1(process):
    assert float(process.p.sum()) == pytest.approx(1)
    assert float(process.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("name", ["rloo", "turn_rloo"])
def test_without_bias_the_mean_over_all_groups_is_the_gradient_of_the_return(process, name):
    mean, _ = process.moments(ESTIMATORS[name])
    assert_close(mean, process.gradient(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["per turn index", "per turn index, means of the others"])
def test_means_of_each_turn_index_bias_the_gradient(process, name):
    mean, _ = process.moments(ESTIMATORS[name])
    assert float((mean - process.gradient()).norm() / process.gradient().norm()) > 0.05


def test_the_bias_is_that_of_a_charge_for_each_further_turn(process):
    mean, _ = process.moments(ESTIMATORS["per turn index, means of the others"])
    assert_close(mean - process.gradient(), process.charge(), rtol=0, atol=1e-12)


def test_the_committed_numbers_are_these():
    committed = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    for row, known in zip(table(), committed, strict=True):
        assert {name: row[name] for name in ("policy", "estimator")}.items() <= known.items()
        for name in ("bias", "variance", "cosine"):
            assert row[name] == pytest.approx(known[name], rel=1e-6, abs=1e-9), row
