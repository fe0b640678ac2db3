"""Facts of estimators, whatever the batch. `check_algorithm` holds all of them to others.

Batches have NaN wherever the mask is 0: nothing may look there.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from srl.advantage import Advantages, score_on_last_token
from srl.plugins import manager

OPTIONS = {
    "ppo": {}, "grpo": {}, "dr_grpo": {"norm_adv_by_std_in_grpo": False}, "rloo": {}, "turn_rloo": {},
    "reinforce": {}, "reinforce_centred": {"normalise": "centre"}, "reinforce_plus_plus": {},
}  # fmt: skip
PLUGINS = {"dr_grpo": "grpo", "reinforce_centred": "reinforce"}
ALGORITHMS = {
    name: manager.load("algorithm", PLUGINS.get(name, name), options) for name, options in OPTIONS.items()
}
GROUPED = ["grpo", "dr_grpo", "rloo", "turn_rloo"]

grouped = pytest.mark.parametrize("name", GROUPED)
seeds = st.integers(0, 2**31)
fast = settings(max_examples=40, deadline=None)


def make_batch(seed: int) -> dict:
    """Random rewards, values, masks with gaps, two groups in any order, and about one row in four invalid."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = (random(6, 9) > 0.4).long()
    return {
        "token_level_rewards": random(6, 9).masked_fill(mask == 0, torch.nan),
        "values": random(6, 9).masked_fill(mask == 0, torch.nan),
        "response_mask": mask,
        "group_ids": torch.randint(0, 2, (6,), generator=generator) * 10 - 5,
        "valid": random(6) > 0.25,
        "group_size": 3,
        "gamma": 0.9,
        "lam": 0.8,
    }


def estimate(name: str, batch: dict, **changes: object) -> Advantages:
    return ALGORITHMS[name].estimator(**{**batch, **changes})


def with_rows(batch: dict, index: Tensor) -> dict:
    """The batch's rows of `index`, in that order."""
    return {key: value[index] if isinstance(value, Tensor) else value for key, value in batch.items()}


@grouped
@given(seed=seeds)
@fast
def test_other_groups_never_influence_a_group_relative_advantage(name, seed):
    batch = make_batch(seed)
    own = (batch["group_ids"] == batch["group_ids"][0]).nonzero().squeeze(1)
    assert_close(estimate(name, batch).advantages[own], estimate(name, with_rows(batch, own)).advantages)


@grouped
@given(score=st.floats(-10, 10, width=32), size=st.integers(2, 8))
@fast
def test_group_that_agrees_teaches_nothing(name, score, size):
    mask = torch.ones(size, 3)
    out = estimate(
        name,
        {
            "token_level_rewards": score_on_last_token(torch.full((size,), score), mask),
            "response_mask": mask,
            "group_ids": torch.zeros(size).long(),
            "valid": torch.ones(size),
            "group_size": size,
        },
    )
    assert (out.advantages == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
@given(seed=seeds, shift=st.floats(-5, 5))
@fast
def test_a_bonus_for_everybody_changes_no_group_relative_advantage(name, seed, shift):
    batch = make_batch(seed)
    mask, wrote = batch["response_mask"], batch["response_mask"].any(1)
    scores = torch.rand(6, dtype=torch.float64)
    batch["valid"] &= wrote
    before = estimate(name, batch, token_level_rewards=score_on_last_token(scores, mask))
    after = estimate(name, batch, token_level_rewards=score_on_last_token(scores + shift, mask))
    assert_close(after.advantages, before.advantages, rtol=1e-5, atol=1e-8)
