"""PPO's estimator on numbers worked out by hand."""

import pytest
import torch
from torch.testing import assert_close

from srl.testing import check_algorithm
from srl_gae.estimator import estimate

ONE_ROW = {
    "token_level_rewards": torch.tensor([[0.0, 0.0, 0.0, 1.0]]),
    "response_mask": torch.tensor([[1, 0, 1, 1]]),
    "values": torch.tensor([[0.5, 9.0, 0.25, 0.75]]),
    "group_ids": torch.zeros(1).long(),
    "valid": torch.ones(1),
}


def test_returns_are_advantages_before_whitening_plus_values():
    returns = estimate(**ONE_ROW, gamma=0.5, lam=0.5).returns
    last, middle = 0.25, 0.5 * 0.75 - 0.25 + 0.25 * 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * middle
    assert_close(returns, torch.tensor([[first + 0.5, 0.0, middle + 0.25, last + 0.75]]))


def test_advantages_are_whitened_over_policy_tokens():
    advantages = estimate(**ONE_ROW).advantages
    raw = torch.tensor([0.5, 0.75, 0.25])
    assert_close(advantages[0, [0, 2, 3]], (raw - 0.5) / (raw.var() + 1e-8).sqrt())
    assert advantages[0, 1] == 0


def test_it_needs_values():
    with pytest.raises(ValueError):
        estimate(**{**ONE_ROW, "values": None})


def test_conforms_to_the_algorithm_seam():
    check_algorithm("ppo")
