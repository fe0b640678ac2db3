"""REINFORCE's estimator on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from srl.errors import UserError
from srl.plugins import manager
from srl.testing import check_algorithm
from srl_reinforce.estimator import estimate

TWO_ROWS = {
    "token_level_rewards": torch.tensor([[1.0, 7.0, 2.0, 4.0], [0.0, 0.0, 2.0, 7.0]]),
    "response_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]),
    "group_ids": torch.arange(2),
    "valid": torch.ones(2),
}
RETURNS = torch.tensor([[3.0, 0.0, 4.0, 4.0], [0.0, 0.0, 2.0, 0.0]])


def test_the_advantage_is_the_return_to_go():
    found = estimate(**TWO_ROWS, gamma=0.5)
    assert_close(found.advantages, RETURNS)
    assert_close(found.returns, RETURNS)


def test_centring_takes_the_mean_over_policy_tokens_off():
    found = estimate(**TWO_ROWS, gamma=0.5, normalise="centre")
    assert_close(found.advantages, (RETURNS - 13 / 4) * TWO_ROWS["response_mask"])
    assert_close(found.returns, RETURNS)


def test_whitening_divides_by_the_standard_deviation_too():
    centred = estimate(**TWO_ROWS, gamma=0.5, normalise="centre").advantages
    whitened = estimate(**TWO_ROWS, gamma=0.5, normalise="whiten").advantages
    spread = RETURNS[TWO_ROWS["response_mask"] == 1].var().sqrt()
    assert_close(whitened, centred / spread)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(UserError, match=r"algorithm\.reinforce\.normalise"):
        manager.load("algorithm", "reinforce", {"normalise": "center"})


@pytest.mark.parametrize("normalise", ["none", "centre", "whiten"])
def test_conforms_to_the_algorithm_seam(normalise):
    check_algorithm("reinforce", {"normalise": normalise})
