"""Turn-level credit on numbers worked out by hand, and without bias where the policy decides when to stop."""

import torch
from torch.testing import assert_close

from srl.testing import check_algorithm
from srl_grpo.rloo import estimate as rloo
from srl_grpo.turns import estimate, turn_rloo

MASK = torch.tensor([[1, 1, 0, 1, 0, 1], [1, 0, 0, 1, 1, 0], [1, 1, 1, 0, 0, 0]])
"""Rows of three, two and one turn."""
GROUP = {
    "token_level_rewards": torch.tensor(
        [[0.0, 0.25, 9.0, 0.5, 9.0, 1.0], [0.0, 9.0, 9.0, 0.0, 0.5, 9.0], [0.0, 0.0, 2.0, 9.0, 9.0, 9.0]]
    ),
    "response_mask": MASK,
    "group_ids": torch.zeros(3).long(),
    "valid": torch.ones(3),
    "group_size": 3,
}


def test_each_turn_is_compared_with_the_others_that_took_it():
    """Returns from each turn on: 1.75, 1.5, 1 in the first row, .5, .5 in the second, 2 in the third.

    Only the first row takes a third turn: the others' whole returns are 1.25 on average, and it has got .75.
    """
    found, returns = estimate(**GROUP)
    first, second, third = 1.75 - 1.25, 1.5 - 0.5, 1.0 - (1.25 - 0.75)
    assert_close(found[0], torch.tensor([first, first, 0, second, 0, third]))
    assert_close(found[1], torch.tensor([0.5 - 1.875, 0, 0, 0.5 - 1.5, 0.5 - 1.5, 0]))
    assert_close(found[2], torch.tensor([2 - 1.125, 2 - 1.125, 2 - 1.125, 0, 0, 0]))
    assert_close(returns[0], torch.tensor([1.75, 1.75, 0, 1.5, 0, 1.0]))


def test_a_failed_row_is_nobodys_baseline():
    found = estimate(**{**GROUP, "valid": torch.tensor([1, 1, 0])}).advantages
    assert_close(found[0, 0], torch.tensor(1.75 - 0.5))
    assert found[2].abs().max() == 0


def test_the_only_survivor_gets_nothing_but_a_group_of_one_its_returns():
    alone = {**GROUP, "valid": torch.tensor([1, 0, 0])}
    assert estimate(**alone).advantages.abs().max() == 0
    assert_close(
        estimate(**{**alone, "group_size": 1}).advantages[0], torch.tensor([1.75, 1.75, 0, 1.5, 0, 1])
    )


def test_with_equally_many_turns_and_a_reward_at_the_end_it_is_rloo():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 0, 1]])
    rewards = torch.tensor([[0, 0, 0, 1.0], [0, 0, 0, 0.0], [0, 0, 0, 0.25]])
    given = {**GROUP, "response_mask": mask, "token_level_rewards": rewards}
    assert_close(estimate(**given).advantages, rloo(**given).advantages)


def test_equal_returns_have_an_advantage_of_exactly_0():
    """Seven of .7 do not sum to seven times .7."""
    rewards = torch.zeros(7, 4)
    rewards[:, 3] = 0.7
    mask = torch.tensor([1, 0, 1, 1]).expand(7, 4)
    given = {"token_level_rewards": rewards, "response_mask": mask, "group_ids": torch.zeros(7).long()}
    assert estimate(**given, valid=torch.ones(7), group_size=7).advantages.abs().max() == 0


def test_it_needs_the_mask_of_turns():
    assert turn_rloo().requires == {"actor.mask_observations": (True,)}


def test_conforms_to_the_algorithm_seam():
    check_algorithm("turn_rloo")
