"""GRPO's estimator on numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from srl.errors import UserError
from srl.plugins import manager
from srl.testing import check_algorithm
from srl_grpo.estimator import algorithm, estimate

GROUP = {
    "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]]),
    "response_mask": torch.ones(3, 2),
    "group_ids": torch.zeros(3).long(),
    "valid": torch.ones(3),
    "group_size": 3,
}


def test_score_against_the_mean_in_units_of_the_spread():
    expected = torch.tensor([0.5, -0.5, 0.0]) / (0.5 + 1e-6)
    assert_close(estimate(**GROUP).advantages, expected[:, None].expand(3, 2))


def test_dr_grpo_does_not_divide_by_the_spread():
    found = estimate(**GROUP, norm_adv_by_std_in_grpo=False).advantages
    assert_close(found[:, 0], torch.tensor([0.5, -0.5, 0.0]))


def test_a_failed_row_is_out_of_mean_and_spread():
    found = estimate(**{**GROUP, "valid": torch.tensor([1, 1, 0])}).advantages[:, 0]
    assert_close(found, torch.tensor([0.5, -0.5, 0.0]) / (0.5**0.5 + 1e-6))


def test_the_only_survivor_gets_nothing_but_a_group_of_one_its_raw_score():
    alone = {**GROUP, "valid": torch.tensor([1, 0, 0])}
    assert estimate(**alone).advantages.abs().max() == 0
    assert_close(estimate(**{**alone, "group_size": 1}).advantages[0], torch.ones(2))


def test_options_reach_the_estimator():
    loaded = manager.load("algorithm", "grpo", {"norm_adv_by_std_in_grpo": False})
    assert_close(loaded.estimator(**GROUP).advantages[:, 0], torch.tensor([0.5, -0.5, 0.0]))


def test_an_epsilon_of_zero_is_refused():
    with pytest.raises(UserError, match=r"algorithm\.grpo\.epsilon"):
        manager.load("algorithm", "grpo", {"epsilon": 0})


def test_grpo_asks_for_groups_and_k3_in_the_loss():
    grpo = algorithm()
    assert not grpo.needs_critic
    assert grpo.defaults["rollout.n"] == 5
    assert grpo.defaults["actor.use_kl_loss"]
    assert grpo.defaults["actor.kl_loss_type"] == "k3"


@pytest.mark.parametrize("by_std", [True, False])
def test_conforms_to_the_algorithm_seam(by_std):
    check_algorithm("grpo", {"norm_adv_by_std_in_grpo": by_std})
