"""The estimators of GRPO and RLOO on numbers worked out by hand."""

import pytest
import torch
from torch.testing import assert_close

from srl.errors import UserError
from srl.plugins import manager
from srl.testing import check_algorithm
from srl_grpo import rloo
from srl_grpo.estimator import estimate

GROUP = {
    "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]]),
    "response_mask": torch.tensor([[0, 1], [1, 1], [1, 1]]),
    "group_ids": torch.zeros(3).long(),
    "valid": torch.ones(3),
    "group_size": 3,
}
TWO_LEFT, ONE_LEFT = ({"valid": torch.tensor(rows)} for rows in ([1, 1, 0], [1, 0, 0]))


@pytest.mark.parametrize(
    ("estimator", "changes", "advantages"),
    [
        (estimate, {}, [0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6), 0.0]),
        (estimate, {"norm_adv_by_std_in_grpo": False}, [0.5, -0.5, 0.0]),
        (estimate, TWO_LEFT, [0.5 / (0.5**0.5 + 1e-6), -0.5 / (0.5**0.5 + 1e-6), 0.0]),
        (estimate, ONE_LEFT, [0.0, 0.0, 0.0]),
        (estimate, {**ONE_LEFT, "group_size": 1}, [1.0, 0.0, 0.0]),
        (rloo.estimate, {}, [0.75, -0.75, 0.0]),
        (rloo.estimate, TWO_LEFT, [1.0, -1.0, 0.0]),
        (rloo.estimate, ONE_LEFT, [0.0, 0.0, 0.0]),
        (rloo.estimate, {**ONE_LEFT, "group_size": 1}, [1.0, 0.0, 0.0]),
    ],
)
def test_every_policy_token_gets_the_rows_advantage(estimator, changes, advantages):
    expected = torch.tensor(advantages)[:, None] * GROUP["response_mask"]
    assert_close(estimator(**{**GROUP, **changes}).advantages, expected)


def test_options_reach_the_estimator_and_are_checked():
    loaded = manager.load("algorithm", "grpo", {"norm_adv_by_std_in_grpo": False})
    assert_close(loaded.estimator(**GROUP).advantages[:, 1], torch.tensor([0.5, -0.5, 0.0]))
    with pytest.raises(UserError) as refusal:
        manager.load("algorithm", "grpo", {"epsilon": 0})
    assert refusal.value.key == "algorithm.grpo.epsilon"


@pytest.mark.parametrize(
    ("name", "options"), [("grpo", {}), ("grpo", {"norm_adv_by_std_in_grpo": False}), ("rloo", {})]
)
def test_conforms_to_the_algorithm_seam(name, options):
    check_algorithm(name, options)
