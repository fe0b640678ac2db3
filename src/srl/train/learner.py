"""The networks of reinforcement learning in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srl.advantage import Algorithm
from srl.config import Config
from srl.models.load import on_device
from srl.models.weights import without_lora
from srl.train.compute_advantages import rollout_correction
from srl.update.batch import Batch
from srl.update.critic import Critic
from srl.update.kl import KLController
from srl.update.logits import trunk
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.rollout_correction import RolloutCorrection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(slots=True)
class Learner:
    """The networks of reinforcement learning, and the KL controller of their rewards.

    `same_weights`: what samples has the actor's weights, to the bit.
    """

    config: Config
    algorithm: Algorithm
    actor: PreTrainedModel
    reference: PreTrainedModel | None
    critic: Critic | None
    kl_control: KLController
    same_weights: bool = True
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of the step under way, by verl's names in `timing_s/…`."""

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measures a part of a step."""
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start

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

    @contextmanager
    def as_reference(self) -> Iterator[PreTrainedModel]:
        """The frozen reference model, on the policy's device; without one, the policy without adapters."""
        if self.reference is not None:
            with on_device(self.reference, self.device):
                yield self.reference
        else:
            with without_lora(self.actor):
                yield self.actor
