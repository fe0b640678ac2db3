"""Estimators against verl's and trl's, at default tolerances, wherever they mean the same.

docs/algorithms.md lists where they do not; the last tests here show those differences.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import srl_gae.estimator
import srl_grpo.estimator
import srl_grpo.rloo
import srl_reinforce.estimator
from srl.advantage import masked_mean, masked_var, masked_whiten, score_on_last_token
from srl.update.kl import kl_penalty, mean_sequence_kl, penalised_rewards

pytestmark = [pytest.mark.slow, pytest.mark.must_run]

seeds = pytest.mark.parametrize("seed", range(5))
ROWS, TOKENS, SIZE = 12, 17, 4


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip("verl.trainer.ppo.core_algos")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_batch(seed: int) -> dict:
    """Three groups of four, masks with gaps inside and a masked head and tail, rewards on policy tokens."""
    mask = (random(seed, ROWS, TOKENS) > -0.4).float()
    mask[:, :2] = mask[:, -3:] = 0
    return {
        "token_level_rewards": random(seed + 100, ROWS, TOKENS) * mask,
        "values": random(seed + 200, ROWS, TOKENS),
        "response_mask": mask,
        "group_ids": torch.arange(ROWS) % (ROWS // SIZE),
        "valid": torch.ones(ROWS),
        "group_size": SIZE,
    }


def for_verl(batch: dict) -> dict:
    """The same batch under verl's names; verl works in place, so these are copies."""
    return {
        "token_level_rewards": batch["token_level_rewards"].clone(),
        "response_mask": batch["response_mask"].clone(),
        "index": batch["group_ids"].numpy(),
    }


@seeds
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9)])
def test_ppo_is_verls_gae_under_the_mask(verl, seed, gamma, lam):
    batch = make_batch(seed)
    ours = srl_gae.estimator.estimate(**batch, gamma=gamma, lam=lam)
    mask = batch["response_mask"]
    advantages, returns = verl.compute_gae_advantage_return(
        batch["token_level_rewards"], batch["values"], mask, gamma, lam
    )
    assert_close(ours.advantages, advantages * mask)
    assert_close(ours.returns, returns * mask)


@seeds
@pytest.mark.parametrize("by_std", [True, False])
def test_grpo_is_verls(verl, seed, by_std):
    batch = make_batch(seed)
    ours = srl_grpo.estimator.estimate(**batch, norm_adv_by_std_in_grpo=by_std)
    theirs = verl.compute_grpo_outcome_advantage(**for_verl(batch), norm_adv_by_std_in_grpo=by_std)
    assert_close(ours.advantages, theirs[0])
    assert_close(ours.returns, theirs[1])


@seeds
def test_rloo_is_verls(verl, seed):
    batch = make_batch(seed)
    ours = srl_grpo.rloo.estimate(**batch)
    for compute in (verl.compute_rloo_outcome_advantage, verl.compute_rloo_vectorized_outcome_advantage):
        assert_close(ours.advantages, compute(**for_verl(batch))[0])


@seeds
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_verls(verl, seed, gamma):
    batch = make_batch(seed)
    ours = srl_reinforce.estimator.reinforce_plus_plus().estimator(**batch, gamma=gamma)
    theirs = verl.compute_reinforce_plus_plus_outcome_advantage(
        **for_verl(batch), config=SimpleNamespace(gamma=gamma)
    )
    assert_close(ours.advantages, theirs[0])
    assert_close(ours.returns, theirs[1])


@seeds
def test_a_group_of_one_is_verls_singleton(verl, seed):
    batch = make_batch(seed) | {"group_ids": torch.arange(ROWS), "group_size": 1}
    theirs = verl.compute_grpo_outcome_advantage(**for_verl(batch))[0]
    assert_close(srl_grpo.estimator.estimate(**batch).advantages, theirs)


@seeds
def test_masked_statistics_are_verls(verl, seed):
    batch = make_batch(seed)
    values, mask = batch["values"], batch["response_mask"]
    assert_close(masked_mean(values, mask), verl.verl_F.masked_mean(values, mask))
    assert_close(masked_var(values, mask), verl.verl_F.masked_var(values, mask))
    assert_close(masked_whiten(values, mask), verl.verl_F.masked_whiten(values, mask) * mask)


@seeds
def test_the_kl_in_the_reward_is_verls(verl, seed):
    """verl's `apply_kl_penalty`, line by line: its module needs more than verl itself installs."""
    batch, old, ref = make_batch(seed), -random(1, ROWS, TOKENS).abs(), -random(2, ROWS, TOKENS).abs()
    mask, coef = batch["response_mask"], 0.05
    theirs = verl.kl_penalty(old, ref, "kl") * mask
    kl = kl_penalty(old, ref, "k1")
    ours = penalised_rewards(batch["token_level_rewards"], kl, mask, coef)
    assert_close(ours, batch["token_level_rewards"] - coef * theirs)
    assert_close(mean_sequence_kl(kl, mask), verl.verl_F.masked_mean(theirs, mask=mask, axis=-1).mean(dim=0))


class OneProcess:
    """What a trl trainer asks of its accelerator, on a single process."""

    device, process_index, num_processes = torch.device("cpu"), 0, 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def trl_advantages(name: str, rewards: Tensor, size: int, **settings: object) -> Tensor:
    """What trl's trainer makes of these rewards (NaN: not scorable), its own code on a stand-in for it."""
    trainers = pytest.importorskip("trl.trainer." + name.lower() + "_trainer")
    trainer_class = getattr(trainers, name + "Trainer")
    rows = len(rewards)
    ids = [[1]] * rows
    generated = (ids, ids, None, ids, None, {}, None, None) if name == "GRPO" else (ids, ids, ids)
    own = {
        "accelerator": OneProcess(),
        "model": SimpleNamespace(training=True, is_gradient_checkpointing=False),
        "args": SimpleNamespace(
            per_device_train_batch_size=rows,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
            report_to=[],
        ),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "num_generations": size,
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["score"],
        "_metrics": {"train": defaultdict(list)},
        "_logs": defaultdict(lambda: defaultdict(list), prompt=[], completion=[], advantages=[]),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_generate": lambda prompts: generated,
        "_calculate_rewards": lambda *_: rewards.unsqueeze(1),
        "_get_per_token_logps_and_entropies": lambda *_, **__: (torch.zeros(rows, 1), None, None),
        **settings,
    }
    names = ("environment_factories", "environments", "tools", "pad_to_multiple_of", "reward_clip_range")
    off = dict.fromkeys([*names, "mask_truncated_completions", "use_vllm", "log_multimodal", "_is_vlm"])
    trainer = SimpleNamespace(**{"beta": 0.0, "num_iterations": 1, **off, **own})
    compute = trainer_class._generate_and_score_completions
    compute = getattr(compute, "__wrapped__", compute)
    return compute(trainer, [{"prompt": "q"} for _ in range(rows)])["advantages"]


def scored(rewards: Tensor, size: int) -> dict:
    """One token a row, groups in the order in which trl expects them, NaN rewards as invalid rows."""
    mask = torch.ones(len(rewards), 1)
    return {
        "token_level_rewards": score_on_last_token(rewards, mask),
        "response_mask": mask,
        "group_ids": torch.arange(len(rewards)) // size,
        "valid": ~rewards.isnan(),
        "group_size": size,
    }


def some_failed(seed: int) -> Tensor:
    """Twelve scores in groups of four: about a third not scorable, the first group with one survivor."""
    rewards = random(seed, ROWS).masked_fill(random(seed + 50, ROWS) > 0.4, torch.nan)
    rewards[:SIZE] = torch.tensor([torch.nan, 0.7, torch.nan, torch.nan])
    return rewards


@seeds
@pytest.mark.parametrize("scale", ["group", "none"])
def test_grpo_is_trls_with_its_epsilon_and_invalid_rows_left_out(seed, scale):
    rewards = some_failed(seed)
    settings = {"multi_objective_aggregation": "sum_then_normalize", "scale_rewards": scale}
    ours = srl_grpo.estimator.estimate(
        **scored(rewards, SIZE), epsilon=1e-4, norm_adv_by_std_in_grpo=scale == "group"
    )
    assert_close(ours.advantages.squeeze(1), trl_advantages("GRPO", rewards, SIZE, **settings))


@seeds
def test_rloo_is_trls_with_invalid_rows_left_out(seed):
    rewards = some_failed(seed)
    ours = srl_grpo.rloo.estimate(**scored(rewards, SIZE))
    theirs = trl_advantages("RLOO", rewards, SIZE, normalize_advantages=False)
    assert_close(ours.advantages.squeeze(1), theirs)


def test_verl_keeps_the_raw_score_of_a_lone_survivor_and_we_do_not(verl):
    batch = make_batch(0) | {"group_ids": torch.arange(ROWS)}
    assert srl_grpo.estimator.estimate(**batch).advantages.abs().max() == 0
    assert verl.compute_grpo_outcome_advantage(**for_verl(batch))[0].abs().max() > 0


def test_verl_counts_a_reward_on_a_masked_tail_in_grpo_and_we_do_not(verl):
    batch = make_batch(0)
    batch["token_level_rewards"][:, -1] = random(9, ROWS)
    silent = make_batch(0)
    assert_close(srl_grpo.estimator.estimate(**batch), srl_grpo.estimator.estimate(**silent))
    loud, quiet = (verl.compute_grpo_outcome_advantage(**for_verl(each))[0] for each in (batch, silent))
    assert not torch.allclose(loud, quiet)


def test_verl_leaves_numbers_off_the_mask_after_gae_and_we_do_not(verl):
    batch = make_batch(0)
    off = batch["response_mask"] == 0
    theirs = verl.compute_gae_advantage_return(
        batch["token_level_rewards"], batch["values"], batch["response_mask"], 1.0, 1.0
    )[0]
    assert theirs[off].abs().max() > 0
    assert srl_gae.estimator.estimate(**batch).advantages[off].abs().max() == 0


def test_verl_refuses_to_whiten_a_single_token_and_we_give_zero(verl):
    mask = torch.tensor([[0.0, 1.0]])
    with pytest.raises(ValueError, match="one"):
        verl.verl_F.masked_whiten(torch.ones(1, 2), mask)
    assert masked_whiten(torch.ones(1, 2), mask).tolist() == [[0, 0]]


def test_verl_teaches_from_a_group_that_agrees_by_rounding_and_we_do_not(verl):
    batch = scored(torch.full((7,), 0.7), 7)
    assert verl.compute_grpo_outcome_advantage(**for_verl(batch))[0].abs().max() > 0.05
    assert srl_grpo.estimator.estimate(**batch).advantages.abs().max() == 0
