"""The networks of reinforcement learning in this process, and their optimisers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from srl.advantage import Algorithm
from srl.config import Config
from srl.models.load import load_model, on_device
from srl.models.weights import has_lora, model_digest, without_lora
from srl.rollout.engine import Engine
from srl.train.compute_advantages import rollout_correction
from srl.train.learning_rate import Network, rate_factor
from srl.train.load_components import LoadedModel, load_algorithm, model_options
from srl.update.batch import Batch
from srl.update.critic import Critic
from srl.update.kl import KLController, kl_controller
from srl.update.logits import trunk
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.optimiser import Optimiser
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


def samples_as_trained(engine: Engine, model: PreTrainedModel) -> bool:
    """Whether `engine` samples with the weights of `model` as the trainer has them.

    An adapter that is merged into weights of less than float32 is rounded, a small one away.
    """
    return engine.same_weights and not (has_lora(model) and model.dtype.itemsize < 4)


def load_learner(config: Config, policy: LoadedModel, same_weights: bool = True) -> Learner:
    """Actor, frozen reference and critic, as far as the algorithm needs them.

    `same_weights`: what samples has the policy's weights (`samples_as_trained`).
    """
    algorithm = load_algorithm(config)
    adapter = config.model.lora_rank > 0 and config.ref.path is None
    reference = _load_reference(config, policy.model) if config.needs_reference and not adapter else None
    critic = Critic(policy.model, **critic_options(config)) if algorithm.needs_critic else None
    control = config.algorithm.kl_ctrl
    kl = kl_controller(control.type, control.kl_coef, control.target_kl, control.horizon)
    return Learner(config, algorithm, policy.model, reference, critic, kl, same_weights)


def critic_options(config: Config) -> dict[str, Any]:
    """The keywords of `srl.update.critic.Critic`: how its adapter is, if it has one."""
    model = config.model
    return {
        "lora_rank": config.critic.lora_rank,
        "lora_alpha": model.lora_alpha,
        "lora_target_modules": model.lora_target_modules,
    }


def _load_reference(config: Config, policy: PreTrainedModel) -> PreTrainedModel:
    """The frozen reference in the policy's precision; of a policy on a GPU in pinned host memory."""
    away = policy.device.type == "cuda"
    options = model_options(config.model) | {
        "dtype": str(policy.dtype).removeprefix("torch."), "lora_rank": 0, "gradient_checkpointing": False,
    } | ({"device": "cpu"} if away else {})  # fmt: skip
    reference = load_model(_reference_path(config), **options).requires_grad_(False)
    for weight in reference.parameters() if away else ():
        weight.data = weight.data.pin_memory()
    return reference


def reference_digest(config: Config, loaded: PreTrainedModel | None = None) -> str:
    """The digest of the reference policy, `loaded` or in its directory; empty where no KL is asked for."""
    if not config.needs_reference:
        return ""
    return model_digest(_reference_path(config) if loaded is None else loaded)


def _reference_path(config: Config) -> str:
    path = config.ref.path or config.model.path
    assert path is not None, "model.path is filled in before the model is loaded"
    return path


def load_optimisers(config: Config, learner: Learner, questions: int | None = None) -> dict[str, Optimiser]:
    """AdamW for the actor, and for the critic where there is one; `questions` as in `learning_rate`."""
    networks: dict[Network, nn.Module] = {"actor": learner.actor}
    if learner.critic is not None:
        networks["critic"] = learner.critic
    optimisers: dict[str, Optimiser] = {}
    for name, model in networks.items():
        section = getattr(config, name)
        optim, schedule = section.optim, rate_factor(config, name, questions=questions)
        optimisers[name] = Optimiser(
            model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay,
            grad_clip=section.grad_clip, schedule=schedule,
        )  # fmt: skip
    return optimisers
