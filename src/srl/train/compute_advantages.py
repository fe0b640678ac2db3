"""What one training step learns from: rewards per token, KL penalty, advantages, returns and their metrics.

Both backends call `compute_advantages`: the local one with the tensors of its own networks, verl with the
fields of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from srl.advantage import Algorithm, masked_mean, score_on_last_token
from srl.config import Config
from srl.update.critic import explained_variance
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.rollout_correction import NO_CORRECTION, Level, Rejection, RolloutCorrection

_GRID = 2.0**-18
"""Rewards of turns are multiples of it, whose sums up to 64 are exact in float32, in any order."""


@dataclass(slots=True)
class StepBatch:
    """The scored episodes of one step, a row each; T may count the prompt or not, but for all fields alike.

    A row with `valid` 0 (its search failed, or it only fills a batch up) has a mask of zeros: it is out of
    the loss, of every mean and of its group's baseline.
    """

    groups: Sequence[str]
    """The question of each row."""
    scores: Tensor  # (B,)
    per_turn: Sequence[Sequence[float] | None]
    """The rewards of each turn, where a score has them."""
    turn_ends: Sequence[Sequence[int]]
    """The position in T of each turn's last token; read only where `per_turn` is set."""
    valid: Tensor  # (B,) bool
    mask: Tensor  # (B, T) 1 on the policy's tokens
    loss_mask: Tensor  # (B, T) as `mask`, or wider where observations are trained on too
    old_logprobs: Tensor | None  # (B, T) float32, as the next two; None: the update's own are the old ones
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None  # (B, T) in the critic's precision
    correction: RolloutCorrection = NO_CORRECTION


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the update takes, each (B, T), and the metrics that describe it.

    The masks are those of the batch without what `correction` rejects, `weights` its importance weights.
    """

    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    mask: Tensor
    loss_mask: Tensor
    weights: Tensor | None
    metrics: dict[str, float]


def compute_advantages(
    batch: StepBatch, config: Config, algorithm: Algorithm, kl_control: KLController
) -> StepResult:
    """Rewards with their penalty, advantages and returns. Moves `kl_control` by one step."""
    rewards, penalty = _penalised_rewards(batch, config, kl_control)
    advantages, returns = algorithm.estimator(
        token_level_rewards=rewards,
        response_mask=batch.loss_mask,
        group_ids=_group_ids(batch.groups).to(rewards.device),
        valid=batch.valid,
        values=None if batch.values is None else batch.values.float(),
        group_size=config.rollout.n,
        gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
    )
    metrics = penalty | _reward_metrics(batch, rewards, advantages)
    if batch.values is not None:
        known = explained_variance(batch.values.float(), returns, batch.loss_mask)
        metrics["critic/vf_explained_var"] = known
    mask, loss_mask, weights = _corrected(batch)
    if batch.old_logprobs is not None:
        metrics |= policy_metrics(
            batch.old_logprobs, batch.mask, batch.sampler_logprobs, batch.ref_logprobs, batch.correction
        )
    return StepResult(rewards, advantages, returns, mask, loss_mask, weights, metrics)


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
    rejections = tuple(_rejection(*each) for each in section.rejections)
    return RolloutCorrection(level, upper, lower, rejections)


def _rejection(option: str, lower: float | None, upper: float) -> Rejection:
    """With the bounds of the divergence; those of k1 are given as ratios."""
    if lower is None:
        return Rejection(option, 0.0, upper)
    return Rejection(option, math.log(lower), math.log(upper))


def needs_old_logprobs(config: Config, correction: RolloutCorrection) -> bool:
    """Whether old log-probs are computed in a pass of their own before the update.

    With one optimiser step for each rollout the policy of the update is still the old one, so the ratio is 1
    and the update's own log-probs serve, unless something needs them for the whole batch beforehand.
    """
    one_step = (
        config.actor.ppo_epochs == 1 and config.actor.ppo_mini_batch_size >= config.data.train_batch_size
    )
    beforehand = config.algorithm.use_kl_in_reward or bool(correction.rejections)
    return not one_step or beforehand


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


def _corrected(batch: StepBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both masks without what is rejected, and the weights."""
    mask, old, sampler = batch.mask, batch.old_logprobs, batch.sampler_logprobs
    if old is None or sampler is None:
        return mask, batch.loss_mask, None
    weights = batch.correction.weights(old, sampler, mask)
    if not batch.correction.rejections:
        return mask, batch.loss_mask, weights
    kept = batch.correction.kept(old, sampler, mask)
    return mask * kept, batch.loss_mask * kept, weights


def token_rewards(batch: StepBatch) -> Tensor:
    """Rewards (B, T): a score on its row's last policy token, or each turn's on that turn's last token.

    Where a score has turns, all are rounded to a grid of 4e-6 on which sums are exact. Rows with equal scores
    that were paid by different turns would otherwise differ by rounding, which GRPO divides by its ε of 1e-6.
    """
    if all(per_turn is None for per_turn in batch.per_turn):
        return score_on_last_token(batch.scores, batch.mask)
    scores = _on_grid(batch.scores)
    rewards = score_on_last_token(scores, batch.mask)
    for row, per_turn in enumerate(batch.per_turn):
        if per_turn is not None and batch.valid[row]:
            turns = _on_grid(torch.tensor(per_turn, device=rewards.device))
            turns[-1] = scores[row] - turns[:-1].sum()
            rewards[row] = 0.0
            rewards[row, list(batch.turn_ends[row])] = turns
    return rewards


def _on_grid(values: Tensor) -> Tensor:
    return (values / _GRID).round() * _GRID


def spread(name: str, values: Tensor) -> dict[str, float]:
    """`<name>/mean`, `/max` and `/min` of `values`."""
    found: dict[str, Callable[[], Tensor]] = {"mean": values.mean, "max": values.max, "min": values.min}
    return {f"{name}/{what}": float(function()) for what, function in found.items()}


def _penalised_rewards(
    batch: StepBatch, config: Config, kl_control: KLController
) -> tuple[Tensor, dict[str, float]]:
    """Rewards per token, minus the KL penalty where the algorithm takes it from the reward."""
    rewards = token_rewards(batch)
    if not config.algorithm.use_kl_in_reward or batch.ref_logprobs is None:
        return rewards, {}
    assert batch.old_logprobs is not None, "needs_old_logprobs says so"
    kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, config.algorithm.kl_penalty)
    measured = float(mean_sequence_kl(kl, batch.mask))
    metrics = {"critic/kl": measured, "critic/kl_coeff": kl_control.coef}
    rewards = penalised_rewards(rewards, kl, batch.mask, kl_control.coef)
    kl_control.update(measured, int(batch.valid.sum()))
    return rewards, metrics


def _group_ids(groups: Sequence[str]) -> Tensor:
    """One number (B,) for each group, by its name."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[name] for name in groups])


def _reward_metrics(batch: StepBatch, rewards: Tensor, advantages: Tensor) -> dict[str, float]:
    """Scores as given, rewards after the penalty, and advantages, over the rows that count."""
    mask = batch.mask.bool()
    kept = mask.any(dim=1)  # (B,)
    if not bool(kept.any()):
        return {}
    return {
        **spread("critic/score", batch.scores[kept]),
        **spread("critic/rewards", (rewards * mask).sum(1)[kept]),
        **spread("critic/advantages", advantages[mask]),
    }
