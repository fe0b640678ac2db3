"""What one training step learns from: rewards per token, KL penalty, advantages, returns and their metrics.

Both backends call `compute_advantages`: the local one with the tensors of its own networks, verl with the
fields of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from srl.advantage import Algorithm, masked_mean, score_on_last_token
from srl.config import Config
from srl.update.critic import explained_variance
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.losses import importance_weights


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
    old_logprobs: Tensor  # (B, T) float32, as the next two
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None  # (B, T) in the critic's precision


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the update takes, each (B, T), and the metrics that describe it. `weights` correct the sampler's
    log-probs, where `rollout.logprobs` is `sampler`."""

    rewards: Tensor
    advantages: Tensor
    returns: Tensor
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
    weights = None
    if config.rollout.logprobs == "sampler" and batch.sampler_logprobs is not None:
        cap = config.rollout.sampler_is_cap
        weights = importance_weights(batch.old_logprobs, batch.sampler_logprobs, batch.mask, cap)
    metrics = _policy_metrics(batch, returns) | penalty | _reward_metrics(batch, rewards, advantages)
    return StepResult(rewards, advantages, returns, weights, metrics)


def token_rewards(batch: StepBatch) -> Tensor:
    """Rewards (B, T): a score on its row's last policy token, or each turn's on that turn's last token."""
    rewards = score_on_last_token(batch.scores, batch.mask)
    for row, per_turn in enumerate(batch.per_turn):
        if per_turn is not None and batch.valid[row]:
            rewards[row] = 0.0
            rewards[row, list(batch.turn_ends[row])] = torch.tensor(per_turn, device=rewards.device)
    return rewards


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


def _policy_metrics(batch: StepBatch, returns: Tensor) -> dict[str, float]:
    """How far the policy is from its sampler and its reference, and the critic from the returns."""
    mask, metrics = batch.mask, dict[str, float]()
    if batch.sampler_logprobs is not None:
        gap = (batch.old_logprobs - batch.sampler_logprobs).abs() * mask
        metrics["rollout/logprob_diff/mean"] = float(masked_mean(gap, mask))
        metrics["rollout/logprob_diff/max"] = float(gap.max())
    if batch.ref_logprobs is not None:
        kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs, "k3")
        metrics["actor/ref_kl"] = float(masked_mean(kl, mask))
    if batch.values is not None:
        metrics["critic/vf_explained_var"] = explained_variance(
            batch.values.float(), returns, batch.loss_mask
        )
    return metrics


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
