"""Facts that hold for every estimator, whatever the batch.

Batches have NaN wherever the mask is 0: nothing may look there.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import srl_gae.estimator
import srl_grpo.estimator
import srl_reinforce.estimator
import srl_reinforce_plus_plus.estimator
import srl_rloo.estimator
from srl.advantage import Advantages, score_on_last_token

dr_grpo = srl_grpo.estimator.Options(norm_adv_by_std_in_grpo=False)
ALGORITHMS = {
    "ppo": srl_gae.estimator.algorithm(),
    "grpo": srl_grpo.estimator.algorithm(),
    "dr_grpo": srl_grpo.estimator.algorithm(dr_grpo),
    "rloo": srl_rloo.estimator.algorithm(),
    "reinforce": srl_reinforce.estimator.algorithm(),
    "reinforce_centred": srl_reinforce.estimator.algorithm(
        srl_reinforce.estimator.Options(normalise="centre")
    ),
    "reinforce_whitened": srl_reinforce.estimator.algorithm(
        srl_reinforce.estimator.Options(normalise="whiten")
    ),
    "reinforce_plus_plus": srl_reinforce_plus_plus.estimator.algorithm(),
}
GROUPED = ["grpo", "dr_grpo", "rloo"]
WHITENED = ["ppo", "reinforce_whitened", "reinforce_plus_plus"]
PER_TOKEN = ("token_level_rewards", "response_mask", "values")

every_algorithm = pytest.mark.parametrize("name", ALGORITHMS)
seeds = st.integers(0, 2**31)
fast = settings(max_examples=40, deadline=None)


def make_batch(seed: int, rows: int = 6, tokens: int = 9) -> dict:
    """Random rewards, values, masks with gaps, two groups in any order, and about one row in four invalid."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    mask = (random(rows, tokens) > 0.4).long()
    return {
        "token_level_rewards": random(rows, tokens).masked_fill(mask == 0, torch.nan),
        "values": random(rows, tokens).masked_fill(mask == 0, torch.nan),
        "response_mask": mask,
        "group_ids": torch.randint(0, 2, (rows,), generator=generator) * 10 - 5,
        "valid": random(rows) > 0.25,
        "group_size": 3,
        "gamma": 0.9,
        "lam": 0.8,
    }


def estimate(name: str, batch: dict, **changes: object) -> Advantages:
    return ALGORITHMS[name].estimator(**{**batch, **changes})


def with_columns(batch: dict, at: int, count: int) -> dict:
    """The batch with `count` columns that the policy did not write, inserted before column `at`."""
    widened = dict(batch)
    for key in PER_TOKEN:
        old = batch[key]
        fill = 0 if key == "response_mask" else torch.nan
        new = torch.full((len(old), count), fill, dtype=old.dtype)
        widened[key] = torch.cat([old[:, :at], new, old[:, at:]], dim=1)
    return widened


def with_rows(batch: dict, index: Tensor) -> dict:
    """The batch's rows of `index`, in that order."""
    return {key: value[index] if isinstance(value, Tensor) else value for key, value in batch.items()}


@every_algorithm
@given(seed=seeds)
@fast
def test_advantages_are_zero_where_the_policy_wrote_nothing_or_the_row_is_invalid(name, seed):
    batch = make_batch(seed)
    live = batch["response_mask"].bool() & batch["valid"][:, None]
    for output in estimate(name, batch):
        assert torch.isfinite(output).all()
        assert (output[~live] == 0).all()


@every_algorithm
@given(seed=seeds, count=st.integers(1, 5))
@fast
def test_padding_changes_nothing(name, seed, count):
    batch = make_batch(seed)
    width = batch["response_mask"].shape[1]
    for before, after in zip(
        estimate(name, batch), estimate(name, with_columns(batch, width, count)), strict=True
    ):
        assert_close(after[:, :width], before)
        assert (after[:, width:] == 0).all()


@every_algorithm
@given(seed=seeds, at=st.integers(0, 9), count=st.integers(1, 5))
@fast
def test_retrieved_tokens_change_nothing(name, seed, at, count):
    batch = make_batch(seed)
    outputs = estimate(name, with_columns(batch, at, count))
    for before, after in zip(estimate(name, batch), outputs, strict=True):
        assert_close(torch.cat([after[:, :at], after[:, at + count :]], dim=1), before)


def test_gae_ignores_retrieved_tokens():
    batch = make_batch(3, rows=1, tokens=4) | {"response_mask": torch.ones(1, 4), "valid": torch.ones(1)}
    batch |= {key: torch.tensor([[0.1, 0.4, 0.2, 0.3]]) for key in ("token_level_rewards", "values")}
    plain = estimate("ppo", batch)
    read = with_columns(batch, 2, 100)
    read["token_level_rewards"][:, 2:102] = 50.0
    read["values"][:, 2:102] = -70.0
    assert_close(estimate("ppo", read).advantages[:, [0, 1, 102, 103]], plain.advantages)
    assert_close(estimate("ppo", read).returns[:, [0, 1, 102, 103]], plain.returns)


@every_algorithm
@given(seed=seeds, order=st.permutations(range(6)))
@fast
def test_the_order_of_rows_changes_nothing(name, seed, order):
    batch, index = make_batch(seed), torch.tensor(order)
    outputs = estimate(name, with_rows(batch, index))
    for before, after in zip(estimate(name, batch), outputs, strict=True):
        assert_close(after, before[index])


@every_algorithm
@given(seed=seeds)
@fast
def test_invalid_rows_never_influence_others(name, seed):
    batch = make_batch(seed)
    batch["token_level_rewards"][~batch["valid"]] = torch.nan
    batch["values"][~batch["valid"]] = torch.nan
    kept = batch["valid"].nonzero().squeeze(1)
    if not len(kept):
        return
    for whole, alone in zip(estimate(name, batch), estimate(name, with_rows(batch, kept)), strict=True):
        assert_close(whole[kept], alone)


@pytest.mark.parametrize("name", GROUPED)
@given(seed=seeds)
@fast
def test_other_groups_never_influence_a_group_relative_advantage(name, seed):
    batch = make_batch(seed)
    own = (batch["group_ids"] == batch["group_ids"][0]).nonzero().squeeze(1)
    assert_close(estimate(name, batch).advantages[own], estimate(name, with_rows(batch, own)).advantages)


@pytest.mark.parametrize("name", GROUPED)
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


@pytest.mark.parametrize("name", GROUPED)
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


@pytest.mark.parametrize("name", GROUPED)
def test_the_only_survivor_of_a_group_gets_nothing(name):
    batch = make_batch(0, rows=3) | {"group_ids": torch.zeros(3).long(), "valid": torch.tensor([0, 1, 0])}
    assert (estimate(name, batch).advantages == 0).all()


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_one_keeps_its_raw_score(name):
    batch = make_batch(1) | {"group_size": 1}
    mask = batch["response_mask"] * batch["valid"][:, None]
    scores = batch["token_level_rewards"].nan_to_num(0).sum(1, keepdim=True)
    assert_close(estimate(name, batch).advantages, scores * mask)


@every_algorithm
@given(seed=seeds, reward=st.floats(-100, 100))
@fast
def test_reward_on_a_masked_tail_does_not_count(name, seed, reward):
    batch = with_columns(make_batch(seed), 9, 2)
    rewarded = batch["token_level_rewards"].clone()
    rewarded[:, -1] = reward
    for silent, loud in zip(
        estimate(name, batch), estimate(name, batch, token_level_rewards=rewarded), strict=True
    ):
        assert torch.equal(loud, silent)


@pytest.mark.parametrize("name", WHITENED)
def test_whitened_advantages_have_mean_zero_and_variance_one_over_the_policys_tokens(name):
    batch = make_batch(2)
    live = batch["response_mask"].bool() & batch["valid"][:, None]
    advantages = estimate(name, batch).advantages[live]
    assert advantages.mean().abs() < 1e-6
    assert advantages.var() == pytest.approx(1, abs=1e-5)


def test_reinforce_with_one_sample_is_grpo_with_one_sample():
    batch = make_batch(4) | {"group_size": 1, "gamma": 1.0}
    rewards = score_on_last_token(torch.rand(6, dtype=torch.float64), batch["response_mask"])
    ours, theirs = (estimate(name, batch, token_level_rewards=rewards) for name in ("reinforce", "grpo"))
    assert_close(ours.advantages, theirs.advantages)


@every_algorithm
def test_float32_in_float32_out(name):
    batch = {
        key: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in make_batch(5).items()
    }
    assert {output.dtype for output in estimate(name, batch)} == {torch.float32}


@every_algorithm
def test_an_estimator_leaves_its_inputs_alone(name):
    batch = make_batch(6)
    copies = {key: value.clone() for key, value in batch.items() if torch.is_tensor(value)}
    estimate(name, batch)
    for key, copy in copies.items():
        assert_close(batch[key], copy, equal_nan=True, rtol=0, atol=0)
