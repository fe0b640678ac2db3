"""From scored trajectories to what the update learns from: log-probs, KL, values, advantages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from srl.advantage import Algorithm, masked_mean, score_on_last_token
from srl.config import Config
from srl.model import without_lora
from srl.trajectory import Score, Trajectory
from srl.update.actor import Experience
from srl.update.batch import Batch, collate
from srl.update.critic import Critic, batched_values, explained_variance
from srl.update.forward import batched_stats
from srl.update.kl import KLController, kl_penalty, mean_sequence_kl, penalised_rewards
from srl.update.losses import importance_weights


@dataclass(slots=True)
class Learner:
    """The networks that give an experience its numbers, and how their rewards are penalised."""

    config: Config
    algorithm: Algorithm
    actor: nn.Module
    reference: nn.Module | None
    critic: Critic | None
    kl_control: KLController

    @property
    def device(self) -> torch.device:
        return next(self.actor.parameters()).device

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[nn.Module]:
        """The frozen reference: its own weights, or the policy with its adapters switched off."""
        if self.reference is not None:
            yield self.reference
        else:
            with without_lora(self.actor):
                yield self.actor

    def stats(self, model: nn.Module, batch: Batch, mask: Tensor) -> tuple[Tensor, Tensor]:
        found = batched_stats(
            model, batch, mask, max_tokens=self.config.actor.ppo_max_token_len,
            temperature=self.config.rollout.temperature,
        )  # fmt: skip
        return found.logprobs, found.entropy

    def needs_reference(self) -> bool:
        return self.config.algorithm.use_kl_in_reward or self.config.actor.use_kl_loss


def make_experience(
    learner: Learner, trajectories: Sequence[Trajectory], scores: Sequence[Score]
) -> tuple[Experience, dict[str, float]]:
    """The experience of one step and the metrics that describe it.

    Rows whose search failed have an all-zero mask and `valid` 0: out of the loss, of every mean and
    of their group's baseline.
    """
    config = learner.config
    batch = collate(trajectories).to(learner.device)
    valid = torch.tensor([item.valid for item in trajectories], device=learner.device)
    mask = batch.response_mask * valid[:, None]
    loss_mask = mask if config.actor.mask_observations else batch.after_prompt * valid[:, None]
    logprobs, entropy = learner.stats(learner.actor, batch, loss_mask)
    metrics = {"actor/entropy": float(masked_mean(entropy, mask)), **_difference(logprobs, batch, mask)}
    ref_logprobs = None
    if learner.needs_reference():
        with learner._as_reference() as reference:
            ref_logprobs, _ = learner.stats(reference, batch, loss_mask)
        metrics["actor/ref_kl"] = float(masked_mean(kl_penalty(logprobs, ref_logprobs, "k3"), mask))
    values = None
    if learner.critic is not None:
        values = batched_values(learner.critic, batch, max_tokens=config.critic.ppo_max_token_len)
    raw = torch.tensor([score.value for score in scores], device=learner.device, dtype=torch.float32)
    rewards = score_on_last_token(raw, mask)
    rewards, penalty = _penalise(learner, rewards, logprobs, ref_logprobs, mask, int(valid.sum()))
    groups = _group_ids(trajectories).to(learner.device)
    advantages, returns = learner.algorithm.estimator(
        token_level_rewards=rewards, response_mask=loss_mask, group_ids=groups, valid=valid, values=values,
        group_size=config.rollout.n, gamma=config.algorithm.gamma, lam=config.algorithm.lam,
    )  # fmt: skip
    metrics |= penalty | _reward_metrics(raw, rewards, advantages, mask, valid)
    if values is not None:
        metrics["critic/vf_explained_var"] = explained_variance(values, returns, loss_mask)
    old, weights = logprobs, None
    if config.rollout.logprobs == "sampler":
        old = torch.where(mask.bool(), batch.sampler_logprobs, logprobs)
        weights = importance_weights(logprobs, old, mask, config.rollout.sampler_is_cap)
    experience = Experience(batch, mask, loss_mask, advantages, returns, old, ref_logprobs, values, weights)
    return experience, metrics


def _difference(logprobs: Tensor, batch: Batch, mask: Tensor) -> dict[str, float]:
    """How far the sampler's log-probs are from the trainer's; they are the same policy's."""
    gap = (logprobs - batch.sampler_logprobs).abs() * mask
    return {"rollout/logprob_diff/mean": float(masked_mean(gap, mask)),
            "rollout/logprob_diff/max": float(gap.max())}  # fmt: skip


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
    numbers = {item.question.id: 0 for item in trajectories}
    numbers = {question: number for number, question in enumerate(numbers)}
    return torch.tensor([numbers[item.question.id] for item in trajectories])


def _reward_metrics(
    raw: Tensor, rewards: Tensor, advantages: Tensor, mask: Tensor, valid: Tensor
) -> dict[str, float]:
    kept, own = raw[valid], advantages[mask.bool()]
    if not len(kept) or not len(own):
        return {}
    metrics = _spread("critic/score", kept) | _spread("critic/rewards", (rewards * mask).sum(1)[valid])
    return metrics | _spread("critic/advantages", own)


def _spread(name: str, values: Tensor) -> dict[str, float]:
    found: dict[str, Callable[[], Tensor]] = {"mean": values.mean, "max": values.max, "min": values.min}
    return {f"{name}/{what}": float(function()) for what, function in found.items()}
