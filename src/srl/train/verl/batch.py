"""The batch of a step as our estimators and penalties take it, made of what verl kept of the episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from srl.advantage import masked_mean, score_on_last_token
from srl.config import Config
from srl.train.experience import spread
from srl.update.critic import explained_variance
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.losses import importance_weights

Extra = Mapping[str, Any]
"""What the agent loop keeps with an episode: `srl_id`, `srl_group`, `srl_valid`, `srl_per_turn`."""


@dataclass(slots=True)
class StepBatch:
    """One step, padded on the right. (B, T) counts the tokens after the prompt.

    `valid` is 0 for episodes that infrastructure broke and for the rows with which verl fills a batch up;
    the mask of both is 0 throughout.
    """

    ids: list[str]
    groups: list[str]
    scores: Tensor  # (B,)
    per_turn: list[Sequence[float] | None]
    mask: Tensor  # (B, T)
    valid: Tensor  # (B,)
    old_logprobs: Tensor  # (B, T)
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Tensor], extra: Sequence[Extra], padding: Sequence[bool]) -> StepBatch:
        """From verl's padded fields; `padding` says which rows only fill the batch up."""
        rows = list(zip(extra, padding, strict=True))
        kept = torch.tensor([bool(item["srl_valid"]) and not fill for item, fill in rows])
        return cls(
            ids=["" if fill else item["srl_id"] for item, fill in rows],
            groups=[f"\0{n}" if fill else item["srl_group"] for n, (item, fill) in enumerate(rows)],
            scores=fields["rm_scores"].float().sum(-1),
            per_turn=[item["srl_per_turn"] for item in extra],
            mask=fields["response_mask"] * kept[:, None],
            valid=kept,
            old_logprobs=fields["old_log_probs"].float(),
            sampler_logprobs=fields.get("rollout_log_probs"),
            ref_logprobs=fields.get("ref_log_prob"),
            values=fields.get("values"),
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the update takes (B, T), and the metrics that describe it."""

    rewards: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor | None
    metrics: dict[str, float]


def learn_from(batch: StepBatch, config: Config, estimate: Any, control: KLController) -> StepResult:
    """Rewards with their penalty, advantages and returns, as `srl.train.experience` makes them.

    `estimate` is the algorithm as it is registered with verl: its estimator under verl's keywords.
    """
    rewards, metrics = _penalised(batch, config, control)
    advantages, returns = estimate(
        token_level_rewards=rewards, response_mask=batch.mask, config=config.algorithm.model_dump(),
        index=batch.groups, values=None if batch.values is None else batch.values.float(), valid=batch.valid,
        group_size=config.rollout.n,
    )  # fmt: skip
    weights = None
    if config.rollout.logprobs == "sampler" and batch.sampler_logprobs is not None:
        sampled = batch.sampler_logprobs.float()
        weights = importance_weights(batch.old_logprobs, sampled, batch.mask, config.rollout.sampler_is_cap)
    metrics |= _described(batch, rewards, advantages, returns)
    return StepResult(rewards, advantages, returns, weights, metrics)


def group_numbers(groups: Sequence[str]) -> Tensor:
    """One number a group, by its name."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([numbers[name] for name in groups])


def token_rewards(batch: StepBatch) -> Tensor:
    """Rewards (B, T): a score on its row's last policy token, or each turn's on that turn's last."""
    rewards = score_on_last_token(batch.scores, batch.mask)
    for row, per_turn in enumerate(batch.per_turn):
        if per_turn is not None and batch.valid[row]:
            rewards[row] = 0.0
            rewards[row, turn_ends(batch.mask[row])] = torch.tensor(per_turn, dtype=rewards.dtype)
    return rewards


def turn_ends(mask: Tensor) -> list[int]:
    """The index of the last token of each run of ones in `mask` (T,)."""
    ends, position = [], 0
    for kept, run in groupby(mask.bool().tolist()):
        position += len(list(run))
        if kept:
            ends.append(position - 1)
    return ends


def _penalised(batch: StepBatch, config: Config, control: KLController) -> tuple[Tensor, dict[str, float]]:
    """KL in the reward, where it is wanted there, and its controller moved one step."""
    rewards = token_rewards(batch)
    if not config.algorithm.use_kl_in_reward or batch.ref_logprobs is None:
        return rewards, {}
    kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs.float(), config.algorithm.kl_penalty)
    measured = float(mean_sequence_kl(kl, batch.mask))
    metrics = {"critic/kl": measured, "critic/kl_coeff": control.coef}
    rewards = penalised_rewards(rewards, kl, batch.mask, control.coef)
    control.update(measured, int(batch.valid.sum()))
    return rewards, metrics


def _described(batch: StepBatch, rewards: Tensor, advantages: Tensor, returns: Tensor) -> dict[str, float]:
    """Means over the rows that are in, under the names that verl gives those over all rows."""
    kept, mask = batch.valid, batch.mask.bool()
    if not bool(kept.any()):
        return {}
    metrics = {
        **spread("critic/score", batch.scores[kept]),
        **spread("critic/rewards", (rewards * mask).sum(1)[kept]),
        **spread("critic/advantages", advantages[mask]),
        **spread("critic/returns", returns[mask]),
    }
    if batch.sampler_logprobs is not None:
        gap = (batch.old_logprobs - batch.sampler_logprobs).abs() * mask
        metrics["rollout/logprob_diff/mean"] = float(masked_mean(gap, mask))
        metrics["rollout/logprob_diff/max"] = float(gap.max())
    if batch.ref_logprobs is not None:
        kl = kl_penalty(batch.old_logprobs, batch.ref_logprobs.float(), "k3")
        metrics["actor/ref_kl"] = float(masked_mean(kl, mask))
    if batch.values is not None:
        metrics |= spread("critic/values", batch.values[mask])
        metrics["critic/vf_explained_var"] = explained_variance(batch.values.float(), returns, batch.mask)
    return metrics
