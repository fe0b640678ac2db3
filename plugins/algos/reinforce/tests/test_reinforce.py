"""The estimator of REINFORCE and REINFORCE++ on numbers worked out by hand."""

import pytest
import torch
from torch.testing import assert_close

from srl.errors import UserError
from srl.plugins import manager
from srl.testing import check_algorithm

MASK = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]])
TWO_ROWS = {
    "token_level_rewards": torch.tensor([[1.0, 7.0, 2.0, 4.0], [0.0, 0.0, 2.0, 7.0]]),
    "response_mask": MASK,
    "group_ids": torch.arange(2),
    "valid": torch.ones(2),
}
RETURNS = torch.tensor([[3.0, 0.0, 4.0, 4.0], [0.0, 0.0, 2.0, 0.0]])
WHITE = (RETURNS - 13 / 4) / (RETURNS[MASK == 1].var() + 1e-8).sqrt() * MASK


@pytest.mark.parametrize(
    ("name", "options", "advantages"),
    [
        ("reinforce", {}, RETURNS),
        ("reinforce", {"normalise": "centre"}, (RETURNS - 13 / 4) * MASK),
        ("reinforce", {"normalise": "whiten"}, WHITE),
        ("reinforce_plus_plus", {}, WHITE),
        ("reinforce++", {}, WHITE),
    ],
)
def test_the_advantage_is_the_return_to_go_normalised_over_the_batch(name, options, advantages):
    outputs = manager.load("algorithm", name, options).estimator(**TWO_ROWS, gamma=0.5)
    assert_close(outputs.returns, RETURNS)
    assert_close(outputs.advantages, advantages)
    check_algorithm(name, options)


def test_an_unknown_normalisation_is_refused():
    with pytest.raises(UserError) as refusal:
        manager.load("algorithm", "reinforce", {"normalise": "center"})
    assert refusal.value.key == "algorithm.reinforce.normalise"
