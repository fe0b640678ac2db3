"""How many steps a network learns for: what its learning-rate schedule counts, on both backends."""

from __future__ import annotations

from typing import Literal

from srl.config import Config
from srl.config.sections import Actor, Critic

Network = Literal["actor", "critic"]


def learning_steps(config: Config, network: Network) -> int:
    """Training steps in which `network` learns: the actor's come after `trainer.critic_warmup`."""
    waits = config.trainer.critic_warmup if network == "actor" else 0
    return max(0, config.trainer.total_training_steps - waits)


def warmup_steps(config: Config, network: Network) -> int:
    """Training steps of the learning rate's warm-up; a ratio is of the steps in which `network` learns."""
    optim = getattr(config, network).optim
    return optim.lr_warmup_steps or round(optim.lr_warmup_steps_ratio * learning_steps(config, network))


def updates_per_step(config: Config, section: Actor | Critic) -> int:
    """Optimiser steps in a training step."""
    return -(-config.data.train_batch_size // section.ppo_mini_batch_size) * section.ppo_epochs


def updates_in_words(config: Config, section: Actor | Critic) -> str:
    """`1 optimiser step`, `2 optimiser steps`: those of a training step."""
    updates = updates_per_step(config, section)
    return f"{updates} optimiser step{'' if updates == 1 else 's'}"
