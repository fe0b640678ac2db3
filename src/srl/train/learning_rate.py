"""The schedule of the learning rates, planned once for both backends.

`questions` is the number of training questions where it is known: a batch has no more of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from srl.config import Config
from srl.config.sections import Actor, Critic, Sft

Network = Literal["actor", "critic"]


def learning_steps(config: Config, network: Network) -> int:
    """Training steps in which `network` learns: the actor waits for `trainer.critic_warmup` of them."""
    waits = config.trainer.critic_warmup if network == "actor" else 0
    return max(0, config.trainer.total_training_steps - waits)


def warmup_steps(config: Config, network: Network) -> int:
    """Training steps of the learning rate's warm-up; a ratio is of the steps in which `network` learns."""
    optim = getattr(config, network).optim
    return optim.lr_warmup_steps or round(optim.lr_warmup_steps_ratio * learning_steps(config, network))


def updates_per_step(config: Config, section: Actor | Critic, questions: int | None = None) -> int:
    """Optimiser steps in a training step."""
    batch = config.data.train_batch_size
    questions_per_step = batch if questions is None else min(batch, questions)
    return -(-questions_per_step // section.ppo_mini_batch_size) * config.actor.ppo_epochs


def rate_factor(
    config: Config, network: Network, *, questions: int | None = None, total: int | None = None
) -> Callable[[int], float]:
    """The factor on the learning rate of `network` at its optimiser step k, counted from 0.

    `total` counts training steps; it is the configuration's by default.
    """
    from srl.update.optimiser import schedule

    section = getattr(config, network)
    updates = updates_per_step(config, section, questions)
    total = learning_steps(config, network) if total is None else total
    kind, warmup = section.optim.lr_scheduler_type, warmup_steps(config, network)
    return schedule(kind, warmup * updates, total * updates)


def sft_factor(sft: Sft) -> Callable[[int], float]:
    """The factor on the learning rate of fine-tuning at its step k, counted from 0."""
    from srl.update.optimiser import schedule

    optim = sft.optim
    warmup = optim.lr_warmup_steps or round(optim.lr_warmup_steps_ratio * sft.steps)
    return schedule(optim.lr_scheduler_type, warmup, sft.steps)
