"""The tensor functions of `srl.advantage`, against numbers worked out by hand."""

import math

import pytest
import torch
from torch.testing import assert_close

from srl.advantage import (
    discounted_returns,
    gae,
    group_count,
    group_mean,
    group_std,
    leave_one_out_mean,
    masked_mean,
    masked_sum,
    masked_whiten,
    score_on_last_token,
)

NAN = float("nan")
MASK = torch.tensor([[1, 0, 0, 1, 1, 0]])


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_sums_and_means_read_nothing_off_the_mask():
    values = row(1, NAN, NAN, 2, 6, math.inf)
    assert masked_sum(values, MASK) == 9
    assert masked_mean(values, MASK) == 3
    assert masked_mean(values, MASK, dim=-1).tolist() == [3]


def test_whitening_by_hand():
    whitened = masked_whiten(row(1, NAN, NAN, 2, 6, NAN), MASK)
    assert_close(whitened, row(-2, 0, 0, -1, 3, 0) / math.sqrt(7 + 1e-8))


def test_the_score_sits_on_the_last_policy_token():
    mask = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    rewards = score_on_last_token(torch.tensor([0.5, 1.0, 2.0]), mask)
    assert rewards.tolist() == [[0, 0, 0.5, 0], [0, 0, 0, 0], [0, 0, 0, 2]]


def test_gamma_counts_policy_tokens():
    returns = discounted_returns(row(1, 100, NAN, 2, 4, 100), MASK, gamma=0.5)
    assert returns.tolist() == [[1 + 1 + 1, 0, 0, 2 + 2, 4, 0]]


def test_gae_by_hand():
    rewards, values = row(0, NAN, 100, 0, 1, 100), row(0.5, NAN, 7, 0.25, 0.75, 7)
    advantages, returns = gae(rewards, values, MASK, gamma=0.5, lam=0.5)
    last = 1 - 0.75
    middle = 0.5 * 0.75 - 0.25 + 0.25 * last
    first = 0.5 * 0.25 - 0.5 + 0.25 * middle
    assert_close(advantages, row(first, 0, 0, middle, last, 0))
    assert_close(returns, row(first + 0.5, 0, 0, middle + 0.25, 1, 0))


def test_gae_with_lambda_one_is_the_return_minus_the_value():
    rewards, values, mask = torch.randn(4, 9), torch.randn(4, 9), torch.rand(4, 9) > 0.4
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0)
    assert_close(returns, discounted_returns(rewards, mask, gamma=0.9))
    assert_close(advantages, (returns - values) * mask)


def test_group_statistics_by_hand():
    scores = torch.tensor([1.0, 10.0, 3.0, 20.0, 8.0, NAN])
    groups, valid = torch.tensor([7, -2, 7, -2, 7, 7]), torch.tensor([1, 1, 1, 0, 1, 0])
    assert group_count(groups, valid).tolist() == [3, 1, 3, 1, 3, 3]
    assert group_mean(scores, groups, valid).tolist() == [4, 10, 4, 10, 4, 4]
    assert_close(group_std(scores, groups, valid), torch.tensor([13.0, 0, 13, 0, 13, 13]).sqrt())
    assert_close(leave_one_out_mean(scores, groups, valid)[[0, 1, 2, 4]], torch.tensor([5.5, 10.0, 4.5, 2.0]))


@pytest.mark.parametrize("score", [1 / 3, 0.7, 123.456])
@pytest.mark.parametrize("size", [3, 6])
def test_the_mean_of_equal_scores_is_that_score_exactly(score, size):
    scores, groups, valid = torch.full((size,), score), torch.zeros(size).long(), torch.ones(size)
    assert torch.equal(group_mean(scores, groups, valid), scores)
    assert torch.equal(leave_one_out_mean(scores, groups, valid), scores)
    assert torch.equal(group_std(scores, groups, valid), torch.zeros(size))
