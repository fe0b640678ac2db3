"""The learning rate of the local backend, for verl's optimisers: every optimiser step moves it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from srl.config import load_saved
from srl.train.learning_rate import Network, rate_factor
from srl.train.verl.job import RUN_VARIABLE
from srl.update.optimiser import at_its_step

if TYPE_CHECKING:
    from omegaconf import DictConfig

VERLS_OWN = {"min_lr_ratio": (None, 0.0), "num_cycles": (None, 0.5)}
"""verl's settings that ours has none for, and what asks for nothing: a schedule asked for stays verl's."""


class Schedule(LambdaLR):
    """Follows its optimiser: every step of that moves it, and nothing else does."""

    def __init__(self, optimiser: Optimizer, factor: Any) -> None:
        super().__init__(optimiser, factor)
        self.used = float(self.get_last_lr()[0])
        optimiser.register_step_post_hook(self._follow)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the schedule was; the rate is that of this one, which may have another end."""
        super().load_state_dict(state_dict)
        at_its_step(self)
        self.used = float(self.get_last_lr()[0])

    def _follow(self, *_: Any) -> None:
        self.used = float(self.get_last_lr()[0])
        self.step()


def our_schedule(engine: Any, optimiser: Optimizer) -> Schedule | None:
    """The schedule of the run in this environment for an engine of verl's; None where verl's own is wanted.

    Warm-up and length are verl's, for the section `verl` may set them; both count training steps in
    which the network learns.
    """
    asked = engine.optimizer_config
    if any(getattr(asked, name) not in usual for name, usual in VERLS_OWN.items()):
        return None
    config = load_saved(Path(os.environ[RUN_VARIABLE]))
    critic = engine.model_config.model_type == "value_model"
    network: Network = "critic" if critic else "actor"
    kind = getattr(config, network).optim.lr_scheduler_type
    if asked.lr_scheduler_type != verls_name(kind):
        kind = asked.lr_scheduler_type
    warmup = max(0, asked.lr_warmup_steps or 0) or int(
        asked.lr_warmup_steps_ratio * asked.total_training_steps
    )
    total = asked.total_training_steps
    return Schedule(optimiser, rate_factor(config, network, kind=kind, warmup=warmup, total=total))


def verls_name(kind: str) -> str:
    """What verl is told of a schedule of ours: it refuses `linear`, and asks us for the factor anyway."""
    return "constant" if kind == "linear" else kind


def actor_learns_after_the_critic(config: DictConfig) -> None:
    """verl plans every optimiser for all training steps; its actor learns from step `critic_warmup` on."""
    optim, first = config.actor_rollout_ref.actor.optim, max(1, config.trainer.critic_warmup)
    optim.total_training_steps = max(1, optim.total_training_steps - (first - 1))
