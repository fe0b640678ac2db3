"""The schedule of the learning rates, planned once for both backends.

`questions` is the number of training questions where it is known: a batch has no more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin
from srl.config.sections import Actor, Critic, Sft
from srl.train.run_directory import RFT, SFT

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


def rate(config: Config, network: Network, step: int, questions: int | None = None) -> float:
    """The learning rate of the first optimiser step of training step `step`, counted from 1."""
    section = getattr(config, network)
    waits = config.trainer.total_training_steps - learning_steps(config, network)
    update = max(0, step - 1 - waits) * updates_per_step(config, section, questions)
    return float(section.optim.lr * rate_factor(config, network, questions=questions)(update))


def rate_notes(
    before: Config, after: Config, steps_done: int, algo: str, questions: int | None = None
) -> Iterator[str]:
    """What another number of steps does to each learning rate of reinforcement learning, `steps_done` steps
    into the run; a line each."""
    if algo in (SFT, RFT):  # a round has a schedule of its own, and epochs may end a fine-tuning earlier
        return
    networks: list[Network] = ["actor"]
    if algorithm_plugin(after.algorithm.name).needs_critic:
        networks.append("critic")
    for network in networks:
        moments = ((before, max(1, steps_done)), (before, steps_done + 1), (after, steps_done + 1))
        last, planned, now = (rate(config, network, step, questions) for config, step in moments)
        if now == planned:
            yield f"the learning rate of the {network} stays at {now:.3g}"
        else:
            yield (
                f"the {getattr(after, network).optim.lr_scheduler_type} schedule of the {network} is "
                f"recomputed for {after.trainer.total_training_steps} steps: its learning rate goes from "
                f"{last:.3g} in step {steps_done} to {now:.3g} in step {steps_done + 1}"
            )
