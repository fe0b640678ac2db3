"""From scored trajectories to what the update learns from: log-probs, KL, values, advantages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.advantage import Algorithm, masked_mean, score_on_last_token
from srl.config import Config
from srl.model import without_lora
from srl.trajectory import Score, Trajectory
from srl.update.actor import Experience
from srl.update.batch import Batch, collate
from srl.update.critic import Critic, batched_values, explained_variance
from srl.update.forward import TokenStats, batched_stats
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.losses import importance_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Learner:
    """The networks that give an experience its numbers, and how their rewards are penalised."""

    config: Config
    algorithm: Algorithm
    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    kl_control: KLController

    @property
    def device(self) -> torch.device:
        return next(self.actor.parameters()).device

    def stats(self, model: PreTrainedModel, batch: Batch, mask: Tensor) -> TokenStats:
        """Log-probs and entropies (B, T) where `mask` is 1, at the temperature of the rollout."""
        return batched_stats(
            model, batch, mask, max_tokens=self.config.actor.ppo_max_token_len,
            temperature=self.config.rollout.temperature,
        )  # fmt: skip

    def reference_logprobs(self, batch: Batch, mask: Tensor) -> Tensor | None:
        """The reference's log-probs (B, T); None where no KL is asked for."""
        if not self.needs_reference():
            return None
        with self._as_reference() as reference:
            return self.stats(reference, batch, mask).logprobs

    def values(self, batch: Batch) -> Tensor | None:
        """The critic's values (B, T); None where there is no critic."""
        if self.critic is None:
            return None
        return batched_values(self.critic, batch, max_tokens=self.config.critic.ppo_max_token_len)

    def needs_reference(self) -> bool:
        return self.config.algorithm.use_kl_in_reward or self.config.actor.use_kl_loss

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        """The frozen reference: its own weights, or the policy with its adapters switched off."""
        if self.reference is not None:
            yield self.reference
        else:
            with without_lora(self.actor):
                yield self.actor


def make_experience(
    learner: Learner, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> tuple[Experience, dict[str, float]]:
    """The experience of one step and the metrics that describe it.

    Rows whose search failed have an all-zero mask and `valid` 0: out of the loss, of every mean and
    of their group's baseline.
    """
    config, device = learner.config, learner.device
    batch = collate(trajectories).to(device)
    valid = torch.tensor([item.valid for item in trajectories], device=device)  # (B,)
    mask = batch.response_mask * valid[:, None]
    loss_mask = mask if config.actor.mask_observations else batch.after_prompt * valid[:, None]
    old = learner.stats(learner.actor, batch, loss_mask)
    ref_logprobs, values = learner.reference_logprobs(batch, loss_mask), learner.values(batch)
    rewards, penalty = _penalise(
        learner, token_rewards(trajectories, scores, mask), old.logprobs, ref_logprobs, mask, int(valid.sum())
    )
    advantages, returns = learner.algorithm.estimator(
        token_level_rewards=rewards, response_mask=loss_mask, group_ids=_group_ids(trajectories).to(device),
        valid=valid, values=values, group_size=config.rollout.n, gamma=config.algorithm.gamma,
        lam=config.algorithm.lam,
    )  # fmt: skip
    weights = None
    if config.rollout.logprobs == "sampler":
        cap = config.rollout.sampler_is_cap
        weights = importance_weights(old.logprobs, batch.sampler_logprobs, mask, cap)
    experience = Experience(
        batch, mask, loss_mask, advantages, returns, old.logprobs, ref_logprobs, values, weights
    )
    metrics = _policy_metrics(experience, old.entropy) | penalty
    metrics |= _reward_metrics(scores, rewards, experience)
    return experience, metrics


def token_rewards(trajectories: Sequence[Trajectory], scores: Sequence[Score], mask: Tensor) -> Tensor:
    """Rewards (B, T): a score on its row's last policy token, or each turn's on that turn's last."""
    values = torch.tensor([score.value for score in scores], device=mask.device, dtype=torch.float32)
    rewards = score_on_last_token(values, mask)
    for row, (trajectory, score) in enumerate(zip(trajectories, scores, strict=True)):
        if score.per_turn is not None and trajectory.valid:
            rewards[row] = 0.0
            rewards[row, _turn_ends(trajectory)] = torch.tensor(score.per_turn, device=mask.device)
    return rewards


def _turn_ends(trajectory: Trajectory) -> list[int]:
    """The index of the last token of each policy segment."""
    ends = accumulate(len(segment.token_ids) for segment in trajectory.segments)
    return [end - 1 for end, segment in zip(ends, trajectory.segments, strict=True) if segment.is_policy]


def _penalise(
    learner: Learner, rewards: Tensor, logprobs: Tensor, ref: Tensor | None, mask: Tensor, rows: int
) -> tuple[Tensor, dict[str, float]]:
    """KL in the reward, where the algorithm wants it there, and its controller moved one step."""
    if not learner.config.algorithm.use_kl_in_reward or ref is None:
        return rewards, {}
    kl = kl_penalty(logprobs, ref, learner.config.algorithm.kl_penalty)
    control, measured = learner.kl_control, float(mean_sequence_kl(kl, mask))
    metrics = {"critic/kl": measured, "critic/kl_coeff": control.coef}
    rewards = penalised_rewards(rewards, kl, mask, control.coef)
    control.update(measured, rows)
    return rewards, metrics


def _group_ids(trajectories: Sequence[Trajectory]) -> Tensor:
    """One number a question, by its id."""
    numbers = {question: n for n, question in enumerate(dict.fromkeys(t.question.id for t in trajectories))}
    return torch.tensor([numbers[item.question.id] for item in trajectories])


def _policy_metrics(experience: Experience, entropy: Tensor) -> dict[str, float]:
    """Of the policy before its update: entropy, and how far it is from its sampler and its reference."""
    mask, logprobs = experience.mask, experience.old_logprobs
    gap = (logprobs - experience.batch.sampler_logprobs).abs() * mask
    metrics = {
        "actor/entropy": float(masked_mean(entropy, mask)),
        "rollout/logprob_diff/mean": float(masked_mean(gap, mask)),
        "rollout/logprob_diff/max": float(gap.max()),
    }
    if experience.ref_logprobs is not None:
        kl = kl_penalty(logprobs, experience.ref_logprobs, "k3")
        metrics["actor/ref_kl"] = float(masked_mean(kl, mask))
    if experience.values is not None:
        known = experience.values, experience.returns, experience.loss_mask
        metrics["critic/vf_explained_var"] = explained_variance(*known)
    return metrics


def _reward_metrics(scores: Sequence[Score], rewards: Tensor, experience: Experience) -> dict[str, float]:
    """Scores as given, rewards after the penalty, and advantages, of the rows that are in."""
    mask = experience.mask.bool()
    kept = mask.any(dim=1)  # (B,)
    if not bool(kept.any()):
        return {}
    raw = torch.tensor([score.value for score in scores], device=mask.device)[kept]
    return {
        **spread("critic/score", raw),
        **spread("critic/rewards", (rewards * mask).sum(1)[kept]),
        **spread("critic/advantages", experience.advantages[mask]),
    }


def spread(name: str, values: Tensor) -> dict[str, float]:
    """`<name>/mean`, `/max` and `/min` of `values`."""
    found: dict[str, Callable[[], Tensor]] = {"mean": values.mean, "max": values.max, "min": values.min}
    return {f"{name}/{what}": float(function()) for what, function in found.items()}
