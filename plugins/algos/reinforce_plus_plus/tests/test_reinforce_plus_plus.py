"""REINFORCE++'s estimator on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from srl.testing import check_algorithm
from srl_reinforce_plus_plus.estimator import algorithm, estimate

TWO_ROWS = {
    "token_level_rewards": torch.tensor([[1.0, 7.0, 2.0, 4.0], [0.0, 0.0, 2.0, 7.0]]),
    "response_mask": torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]),
    "group_ids": torch.zeros(2).long(),
    "valid": torch.ones(2),
}


def test_returns_are_whitened_over_the_policys_tokens_of_the_whole_batch():
    found = estimate(**TWO_ROWS, gamma=0.5)
    returns = torch.tensor([3.0, 4.0, 4.0, 2.0])
    assert_close(found.returns[TWO_ROWS["response_mask"] == 1], returns)
    expected = (returns - returns.mean()) / (returns.var() + 1e-8).sqrt()
    assert_close(found.advantages[TWO_ROWS["response_mask"] == 1], expected)


def test_reinforce_plus_plus_asks_for_k1_in_the_reward_and_no_critic():
    assert algorithm().defaults["algorithm.use_kl_in_reward"]
    assert not algorithm().needs_critic


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "reinforce++"])
def test_conforms_to_the_algorithm_seam_under_both_names(name):
    check_algorithm(name)
