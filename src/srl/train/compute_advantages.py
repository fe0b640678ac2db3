"""What one training step learns from: rewards per token, KL penalty, advantages, returns and their metrics.

Both backends make an `Experience` and call `compute_advantages`: the local one with the tensors of its own
networks, verl with the fields of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from srl.advantage import Algorithm, masked_mean, score_on_last_token
from srl.config import Config
from srl.update.actor import Experience
from srl.update.critic import explained_variance
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.rollout_correction import NO_CORRECTION, Level, RolloutCorrection

_GRID = 2.0**-18
"""Rewards of turns are multiples of it, whose sums up to 64 are exact in float32, in any order."""


def compute_advantages(
    experience: Experience, config: Config, algorithm: Algorithm, kl_control: KLController,
    correction: RolloutCorrection = NO_CORRECTION,
) -> Experience:  # fmt: skip
    """The experience with its advantages, returns and metrics: rewards less the KL penalty where the
    algorithm takes it from the reward, and the importance weights of `correction`.

    Moves `kl_control` by one step.
    """
    mask, loss_mask, rewards = experience.mask, experience.loss_mask, experience.rewards
    old, sampler, reference = experience.old_logprobs, experience.sampler_logprobs, experience.ref_logprobs
    metrics = dict[str, float]()
    if config.algorithm.use_kl_in_reward and reference is not None:
        assert old is not None, "needs_old_logprobs says so"
        kl = kl_penalty(old, reference, config.algorithm.kl_penalty)
        measured = float(mean_sequence_kl(kl, mask))
        metrics = {"critic/kl": measured, "critic/kl_coeff": kl_control.coef}
        rewards = penalised_rewards(rewards, kl, mask, kl_control.coef)
        kl_control.update(measured, int(experience.valid.sum()))
    values = None if experience.values is None else experience.values.float()
    advantages, returns = algorithm.estimator(
        token_level_rewards=rewards,
        response_mask=loss_mask,
        group_ids=experience.group_ids,
        valid=experience.valid,
        values=values,
        group_size=config.rollout.n,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
    )
    on = mask.bool()
    if bool((rows := on.any(dim=1)).any()):  # (B,)
        metrics |= spread("critic/score", (experience.rewards * on).sum(1)[rows])
        metrics |= spread("critic/rewards", (rewards * on).sum(1)[rows])
        metrics |= spread("critic/advantages", advantages[on])
    if values is not None:
        metrics["critic/vf_explained_var"] = explained_variance(values, returns, loss_mask)
    weights = None
    if old is not None:
        metrics |= policy_metrics(old, mask, sampler, reference, correction)
        if sampler is not None:
            weights = correction.weights(old, sampler, mask)
    return replace(
        experience, rewards=rewards, advantages=advantages, returns=returns, weights=weights, metrics=metrics
    )


def rollout_correction(config: Config, same_weights: bool) -> RolloutCorrection:
    """What `algorithm.rollout_correction` asks for.

    auto weights each token, unless the engine samples with the `same_weights` as the trainer's.
    """
    section = config.algorithm.rollout_correction
    level: Level | None = None
    if section.rollout_is in ("token", "sequence"):
        level = section.rollout_is
    elif section.rollout_is == "auto" and not same_weights:
        level = "token"
    lower, upper = section.bounds
    return RolloutCorrection(level, upper, lower)


def needs_old_logprobs(config: Config) -> bool:
    """Whether old log-probs are computed in a pass of their own before the update.

    With one optimiser step for each rollout the policy of the update is still the old one, so the ratio is 1
    and the update's own log-probs serve, unless the KL penalty of the rewards needs them beforehand. The
    default sizes, mini-batches of half a batch, need the pass; verl makes it always.
    """
    one_step = (
        config.actor.ppo_epochs == 1 and config.actor.ppo_mini_batch_size >= config.data.train_batch_size
    )
    return not one_step or config.algorithm.use_kl_in_reward


def policy_metrics(
    old: Tensor, mask: Tensor, sampler: Tensor | None, reference: Tensor | None, correction: RolloutCorrection
) -> dict[str, float]:
    """How far the policy, by its `old` log-probs, is from its sampler and its reference."""
    metrics = dict[str, float]()
    if sampler is not None:
        gap = (old - sampler).abs().masked_fill(~mask.bool(), 0)
        metrics["rollout/logprob_diff/mean"] = float(masked_mean(gap, mask))
        metrics["rollout/logprob_diff/max"] = float(gap.max())
        metrics |= correction.metrics(old, sampler, mask)
    if reference is not None:
        metrics["actor/ref_kl"] = float(masked_mean(kl_penalty(old, reference, "k3"), mask))
    return metrics


def token_rewards(
    scores: Tensor, per_turn: Sequence[Sequence[float] | None], turn_ends: Sequence[Sequence[int]],
    mask: Tensor,
) -> Tensor:  # fmt: skip
    """Rewards (B, T): a score (B,) on its row's last policy token, or each turn's on that turn's last token.

    Where a score has turns, all are rounded to a grid of 4e-6 on which sums are exact. Rows with equal scores
    that were paid by different turns would otherwise differ by rounding, which GRPO divides by its ε of 1e-6.
    A row without a policy token in `mask` gets none.
    """
    if all(turns is None for turns in per_turn):
        return score_on_last_token(scores, mask)
    scores = _on_grid(scores)
    rewards = score_on_last_token(scores, mask)
    for row, turn_rewards in enumerate(per_turn):
        if turn_rewards is not None and bool(mask[row].any()):
            turns = _on_grid(torch.tensor(turn_rewards, device=rewards.device))
            turns[-1] = scores[row] - turns[:-1].sum()
            rewards[row] = 0.0
            rewards[row, list(turn_ends[row])] = turns
    return rewards


def _on_grid(values: Tensor) -> Tensor:
    return (values / _GRID).round() * _GRID


def spread(name: str, values: Tensor) -> dict[str, float]:
    """`<name>/mean`, `/max` and `/min` of `values`."""
    statistics: dict[str, Callable[[], Tensor]] = {"mean": values.mean, "max": values.max, "min": values.min}
    return {f"{name}/{statistic}": float(function()) for statistic, function in statistics.items()}
