"""RLOO's estimator on numbers worked out by hand."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from srl.testing import check_algorithm
from srl_rloo.estimator import algorithm, estimate

GROUP = {
    "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]]),
    "response_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
    "group_ids": torch.zeros(3).long(),
    "valid": torch.ones(3),
    "group_size": 3,
}


def test_score_against_the_mean_of_the_others():
    found = estimate(**GROUP).advantages
    assert_close(found, torch.tensor([[0.0, 0.75], [-0.75, -0.75], [0.0, 0.0]]))


def test_a_failed_row_is_nobodys_baseline():
    found = estimate(**{**GROUP, "valid": torch.tensor([1, 1, 0])}).advantages[:, 1]
    assert_close(found, torch.tensor([1.0, -1.0, 0.0]))


def test_the_only_survivor_gets_nothing_but_a_group_of_one_its_raw_score():
    alone = {**GROUP, "valid": torch.tensor([1, 0, 0])}
    assert estimate(**alone).advantages.abs().max() == 0
    assert estimate(**{**alone, "group_size": 1}).advantages[0].tolist() == [0, 1]


def test_rloo_asks_for_groups_and_k1_in_the_reward():
    defaults = algorithm().defaults
    assert defaults["rollout.n"] == 5
    assert defaults["algorithm.use_kl_in_reward"]
    assert not defaults["actor.use_kl_loss"]


def test_conforms_to_the_algorithm_seam():
    check_algorithm("rloo")
