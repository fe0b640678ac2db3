"""Rewards per token, KL, groups, masks and metrics of a step, on both backends."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.rows import policy, trajectory
from tests.training import SETTINGS

from srl.advantage import Advantages, Algorithm
from srl.config import load_config
from srl.models.weights import add_lora
from srl.plugins import manager
from srl.train.compute_advantages import compute_advantages, token_rewards
from srl.train.rl import Learner, make_experience
from srl.train.verl.batch import step_batch
from srl.trajectory import Score
from srl.update.batch import collate
from srl.update.critic import Critic
from srl.update.kl import AdaptiveKL, FixedKL, kl_penalty
from srl.update.logprobs import batched_stats

SPECS = ("ppaaooaa", "paafa", "paaa", "ppaoaaa")
NAMES = ("x", "y", "x", "z")
SCORES = (1.0, 0.5, 0.0, -1.0)
CORRECTION = "algorithm__rollout_correction"


class Recorder:
    """An estimator that keeps what it was asked, and answers with the rewards."""

    def __call__(self, **asked):
        self.asked = asked
        mask = asked["response_mask"] * asked["valid"][:, None]
        return Advantages(asked["token_level_rewards"] * mask, asked["token_level_rewards"] * mask)


def learner(algo="grpo", *, kl=0.1, reference=True, critic=False, control=None, **settings):
    given = {name.replace("__", "."): value for name, value in settings.items()}
    config = load_config(None, None, algo, {**SETTINGS, **given}).config
    algorithm = Algorithm("recorder", Recorder())
    actor = policy()
    beside = (policy(1) if reference else None, Critic(actor) if critic else None)
    return Learner(config, algorithm, actor, *beside, control or FixedKL(kl))


def episodes(failed=()):
    return [
        trajectory(spec, seed=n, question=name, failed=n in failed)
        for n, (spec, name) in enumerate(zip(SPECS, NAMES, strict=True))
    ]


def scores(values=SCORES):
    return [Score(value) for value in values]


def rewards_of(trajectories, given, mask):
    """Rewards per token (B, T) under `mask`."""
    values, turns = torch.tensor([score.value for score in given]), [score.per_turn for score in given]
    ends = [item.turn_ends for item in trajectories]
    return token_rewards(values, turns, ends, mask)


@given(
    parts=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=2, max_size=5),
    unit=st.sampled_from([1 / 3, 0.1, 0.25 / 3, 0.2 / 7]), answer=st.sampled_from([0.0, 0.5, 2 / 3, 1.0]),
)  # fmt: skip
def test_rows_with_equal_scores_have_no_advantage_whatever_turns_were_paid(parts, unit, answer):
    """Sums in float32 would differ in the last bit, and GRPO would divide that by 1e-6."""
    most = max(map(sum, parts))
    turns = [[*(unit * one for one in row), unit * (most - sum(row)) + answer] for row in parts]
    ends = [tuple(range(2, 2 + 3 * len(one), 3)) for one in turns]
    mask = torch.zeros(len(parts), 40)
    for row, places in enumerate(ends):
        mask[row, list(places)] = 1
    valid = torch.ones(len(parts), dtype=torch.bool)
    scores = torch.tensor([unit * most + answer] * len(parts))
    rewards = token_rewards(scores, turns, ends, mask)
    assert rewards.sum(dim=-1).tolist() == pytest.approx(scores.tolist(), abs=1e-5)
    for row, (own, places) in enumerate(zip(turns, ends, strict=True)):
        assert rewards[row, list(places)].tolist() == pytest.approx(own, abs=4e-5)
    advantages, _ = manager.load("algorithm", "grpo").estimator(
        token_level_rewards=rewards, response_mask=mask, gamma=1.0, lam=1.0, values=None,
        group_ids=torch.zeros(len(parts), dtype=torch.long), valid=valid, group_size=len(parts),
    )  # fmt: skip
    assert advantages.abs().max() == 0


def test_kl_in_the_reward_lands_on_policy_tokens_only():
    them = learner("rloo", kl=0.5)
    experience, metrics = make_experience(them, episodes(), scores())
    asked = them.algorithm.estimator.asked
    plain = rewards_of(episodes(), scores(), experience.mask)
    kl = kl_penalty(experience.old_logprobs, experience.ref_logprobs, "k1") * experience.mask
    torch.testing.assert_close(asked["token_level_rewards"], plain - 0.5 * kl)
    assert not (asked["token_level_rewards"] - plain)[experience.mask == 0].any()
    assert (kl != 0).sum() == experience.mask.sum(), "the two policies differ on every token"
    assert metrics["critic/kl_coeff"] == 0.5
    mean = (kl.sum(1) / experience.mask.sum(1)).mean()
    assert metrics["critic/kl"] == pytest.approx(float(mean), rel=1e-5)
    assert metrics["critic/rewards/mean"] == pytest.approx(float((plain - 0.5 * kl).sum(1).mean()), rel=1e-5)
    assert metrics["critic/score/mean"] == pytest.approx(sum(SCORES) / 4)


def test_groups_are_questions():
    them = learner()
    make_experience(them, episodes(), scores())
    batch = them.algorithm.estimator.asked
    groups = batch["group_ids"].tolist()
    assert groups[0] == groups[2]
    assert len(set(groups)) == 3
    assert batch["group_size"] == them.config.rollout.n == 5


def test_rows_whose_search_failed_are_out_of_everything():
    everyone, them = learner("rloo"), learner("rloo")
    kept = [0, 2, 3]
    few = [episodes()[n] for n in kept]
    expected, few_metrics = make_experience(everyone, few, [scores()[n] for n in kept])
    found, metrics = make_experience(them, episodes(failed=(1,)), [Score(1.0), Score(99.0), *scores()[2:]])
    asked = them.algorithm.estimator.asked
    assert asked["valid"].tolist() == [True, False, True, True]
    assert not found.mask[1].any()
    assert not found.loss_mask[1].any()
    assert not found.advantages[1].any()
    assert not asked["token_level_rewards"][1].any()
    for name in ("mask", "loss_mask", "advantages", "returns", "old_logprobs", "ref_logprobs"):
        torch.testing.assert_close(getattr(found, name)[kept], getattr(expected, name), msg=name)
    assert metrics == pytest.approx(few_metrics, rel=1e-5)


def test_the_adaptive_controller_moves_after_the_step_it_is_used_in():
    control = AdaptiveKL(0.5, target=1e-6, horizon=40)
    them = learner("rloo", control=control)
    metrics = [make_experience(them, episodes(failed=(1,)), scores())[1] for _ in range(2)]
    grown = 1 + 0.2 * 3 / 40
    assert metrics[0]["critic/kl"] > 1e-6, "far above the target"
    assert [values["critic/kl_coeff"] for values in metrics] == pytest.approx([0.5, 0.5 * grown])
    assert control.coef == pytest.approx(0.5 * grown**2)


def test_old_log_probs_are_the_trainers_own_at_the_sampling_temperature():
    them = learner(rollout__temperature=0.5)
    experience, metrics = make_experience(them, episodes(), scores())
    batch = collate(episodes())
    stats = batched_stats(policy(), batch, batch.response_mask, max_tokens=1000, temperature=0.5)
    torch.testing.assert_close(experience.old_logprobs, stats.logprobs)
    assert experience.weights is None
    gap = (stats.logprobs - batch.sampler_logprobs).abs() * batch.response_mask
    assert metrics["rollout/logprob_diff/max"] == pytest.approx(float(gap.max()), rel=1e-5)
    mean = float(gap.sum() / batch.response_mask.sum())
    assert metrics["rollout/logprob_diff/mean"] == pytest.approx(mean, rel=1e-5)
    entropy = float(stats.entropy.sum() / batch.response_mask.sum())
    assert metrics["actor/entropy"] == pytest.approx(entropy, rel=1e-5)


def test_without_the_mask_everything_after_the_prompt_is_trained():
    them = learner("rloo", actor__mask_observations=False)
    experience, _ = make_experience(them, episodes(failed=(1,)), scores())
    asked = them.algorithm.estimator.asked
    after = torch.tensor(
        [[0, 0, 1, 1, 1, 1, 1, 1], [0] * 8, [0, 1, 1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1, 0]]
    )
    assert torch.equal(experience.loss_mask, after.float())
    assert torch.equal(asked["response_mask"], after.float())
    assert experience.mask.sum() == 4 + 3 + 4
    assert (experience.old_logprobs != 0).sum() == after.sum()
    plain = rewards_of(episodes(failed=(1,)), scores(), experience.mask)
    moved = (asked["token_level_rewards"] - plain).abs() > 1e-7
    assert not moved[experience.mask == 0].any(), "what was read costs no KL"


def test_the_reference_of_an_adapter_is_the_policy_without_it():
    them = learner(reference=False)
    add_lora(them.actor, 4)
    with torch.no_grad():
        for name, parameter in them.actor.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    experience, _ = make_experience(them, episodes(), scores())
    batch = collate(episodes())
    bare = batched_stats(policy(), batch, batch.response_mask, max_tokens=1000)
    torch.testing.assert_close(experience.ref_logprobs, bare.logprobs)
    assert not torch.allclose(experience.old_logprobs, bare.logprobs)


@pytest.mark.parametrize(
    ("algo", "kl_in_reward"), [("ppo", True), ("grpo", False), ("reinforce_plus_plus", False)]
)
def test_both_backends_make_the_same_tensors_and_metrics_bit_for_bit(algo, kl_in_reward):
    """The fields of a verl batch that has the local backend's numbers, turn rewards and a failed row."""
    trajectories = episodes(failed=(3,))
    given = [Score(1.0, per_turn=(0.25, 0.75)), *scores()[1:]]
    sets = {"algorithm__use_kl_in_reward": kl_in_reward, f"{CORRECTION}__rollout_is": "token"}
    them = learner(algo, critic=algo == "ppo", control=AdaptiveKL(0.3, target=0.01, horizon=40), **sets)
    them.algorithm = manager.load("algorithm", algo)
    if them.critic is not None:
        torch.nn.init.normal_(them.critic.head.weight)
    experience, metrics = make_experience(them, trajectories, given)
    rewards = torch.zeros_like(experience.mask)
    rewards[:, -1] = torch.tensor([score.value for score in given])
    fields = {
        "rm_scores": rewards, "response_mask": experience.batch.response_mask.long(),
        "old_log_probs": experience.old_logprobs, "rollout_log_probs": experience.batch.sampler_logprobs,
        "ref_log_prob": experience.ref_logprobs, "values": experience.values,
    }  # fmt: skip
    extra = [
        {"srl_group": item.question.id, "srl_valid": item.valid, "srl_per_turn": score.per_turn,
         "srl_turn_ends": item.turn_ends} for item, score in zip(trajectories, given, strict=True)
    ]  # fmt: skip
    known = {name: field for name, field in fields.items() if field is not None}
    step, control = step_batch(known, extra, [False] * 4), AdaptiveKL(0.3, target=0.01, horizon=40)
    found = compute_advantages(step, them.config, them.algorithm, control, them.correction)
    for name in ("advantages", "returns", "weights"):
        assert torch.equal(getattr(found, name), getattr(experience, name)), name
    assert found.metrics == {name: value for name, value in metrics.items() if name != "actor/entropy"}
    assert control.coef == them.kl_control.coef
    assert float(found.advantages.abs().max()) > 0.1
