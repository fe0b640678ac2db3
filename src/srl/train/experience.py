"""Scored trajectories and the local networks' numbers for them become the experience of one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.advantage import Algorithm, masked_mean
from srl.config import Config
from srl.models.load import on_device
from srl.models.weights import without_lora
from srl.train.compute_advantages import (
    StepBatch,
    compute_advantages,
    needs_old_logprobs,
    policy_metrics,
    rollout_correction,
)
from srl.trajectory import Score, Trajectory
from srl.update.actor import Experience
from srl.update.batch import Batch, collate, response_and_loss_mask
from srl.update.critic import Critic, batched_values
from srl.update.kl import KLController
from srl.update.logits import trunk
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.rollout_correction import RolloutCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Timed = Callable[[str], contextlib.AbstractContextManager[None]]
"""Measures a part of a step by its name, verl's in `timing_s/…`."""


def _untimed(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


@dataclass(slots=True)
class Learner:
    """The networks of the local backend, and the KL controller of their rewards.

    `same_weights`: what samples has the actor's weights, to the bit.
    """

    config: Config
    algorithm: Algorithm
    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    kl_control: KLController
    same_weights: bool = True

    @property
    def correction(self) -> RolloutCorrection:
        return rollout_correction(self.config, self.same_weights)

    @property
    def device(self) -> torch.device:
        return next(self.actor.parameters()).device

    @property
    def trunks(self) -> list[PreTrainedModel]:
        """The trunks of all networks, the policy's first."""
        networks = (self.actor, self.critic, self.reference)
        return [trunk(network) for network in networks if network is not None]

    def stats(self, model: PreTrainedModel, batch: Batch, mask: Tensor) -> TokenStats:
        """Log-probs and entropies (B, T) where `mask` is 1, at the temperature of the rollout."""
        return batched_stats(
            model, batch, mask, max_tokens=self.config.actor.ppo_max_token_len,
            temperature=self.config.rollout.temperature,
        )  # fmt: skip

    def reference_logprobs(self, batch: Batch, mask: Tensor) -> Tensor | None:
        """The reference's log-probs (B, T); None where the configuration uses no KL."""
        if not self.config.needs_reference:
            return None
        with self._as_reference() as reference:
            return self.stats(reference, batch, mask).logprobs

    def values(self, batch: Batch) -> Tensor | None:
        """The critic's values (B, T); None without a critic."""
        if self.critic is None:
            return None
        return batched_values(self.critic, batch, max_tokens=self.config.critic.ppo_max_token_len)

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[PreTrainedModel]:
        """The frozen reference model, on the policy's device; without one, the policy without adapters."""
        if self.reference is not None:
            with on_device(self.reference, self.device):
                yield self.reference
        else:
            with without_lora(self.actor):
                yield self.actor


def make_experience(
    learner: Learner, trajectories: Sequence[Trajectory], scores: Sequence[Score], timed: Timed = _untimed
) -> tuple[Experience, dict[str, float]]:
    """The experience of one step and the metrics that describe it.

    A row whose search failed has `valid` 0 and a mask of zeros: it is out of the loss, of every mean and of
    its group's baseline. Where old log-probs are those of the update (`needs_old_logprobs`), there are none
    here, and `update_metrics` has the metrics that need them.
    """
    batch = collate(trajectories).to(learner.device)
    valid = torch.tensor([item.valid for item in trajectories], device=learner.device)  # (B,)
    mask, loss_mask = response_and_loss_mask(
        batch, valid, mask_observations=learner.config.actor.mask_observations
    )
    correction, old = learner.correction, None
    if needs_old_logprobs(learner.config, correction):
        with timed("old_log_prob"):
            old = learner.stats(learner.actor, batch, loss_mask)
    reference = values = None
    if learner.config.needs_reference:
        with timed("ref"):
            reference = learner.reference_logprobs(batch, loss_mask)
    if learner.critic is not None:
        with timed("values"):
            values = learner.values(batch)
    step = StepBatch(
        groups=[item.question.id for item in trajectories],
        scores=torch.tensor([score.value for score in scores], device=learner.device, dtype=torch.float32),
        per_turn=[score.per_turn for score in scores],
        turn_ends=[item.turn_ends for item in trajectories],
        valid=valid, mask=mask, loss_mask=loss_mask, old_logprobs=None if old is None else old.logprobs,
        sampler_logprobs=batch.sampler_logprobs, ref_logprobs=reference, values=values, correction=correction,
    )  # fmt: skip
    with timed("adv"):
        result = compute_advantages(step, learner.config, learner.algorithm, learner.kl_control)
    experience = Experience(
        batch, result.mask, result.loss_mask, result.advantages, result.returns, step.old_logprobs,
        reference, values, result.weights, None if old is None else old.entropy,
    )  # fmt: skip
    return experience, ({} if old is None else _entropy(old, mask)) | result.metrics


def update_metrics(
    learner: Learner, experience: Experience, stats: TokenStats, mask: Tensor
) -> dict[str, float]:
    """The metrics of the policy by the log-probs and entropies `stats` of its update, where `mask` (B, T) is
    1."""
    sampler = experience.batch.sampler_logprobs
    return _entropy(stats, mask) | policy_metrics(
        stats.logprobs, mask, sampler, experience.ref_logprobs, learner.correction
    )


def _entropy(stats: TokenStats, mask: Tensor) -> dict[str, float]:
    return {"actor/entropy": float(masked_mean(stats.entropy, mask))}
