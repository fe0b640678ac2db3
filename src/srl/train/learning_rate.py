"""The schedule of the learning rates, planned once for both backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin
from srl.config.sections import Actor, Critic

Network = Literal["actor", "critic"]


def learning_steps(config: Config, network: Network) -> int:
    """Training steps in which `network` learns: the actor waits for `trainer.critic_warmup` of them."""
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
    """`1 optimiser step` or `2 optimiser steps`: those of a training step."""
    updates = updates_per_step(config, section)
    return f"{updates} optimiser step{'' if updates == 1 else 's'}"


def rate_factor(
    config: Config, network: Network, *, kind: str | None = None,
    warmup: int | None = None, total: int | None = None,
) -> Callable[[int], float]:  # fmt: skip
    """The factor on the learning rate of `network` at its optimiser step k, counted from 0.

    `warmup` and `total` count training steps; they and `kind` are the configuration's by default.
    """
    from srl.update.optimiser import schedule

    section = getattr(config, network)
    updates = updates_per_step(config, section)
    warmup = warmup_steps(config, network) if warmup is None else warmup
    total = learning_steps(config, network) if total is None else total
    kind = kind or section.optim.lr_scheduler_type
    return schedule(kind, warmup * updates, total * updates)  # type: ignore[arg-type]


def rate(config: Config, network: Network, step: int) -> float:
    """The learning rate of the first optimiser step of training step `step`, counted from 1."""
    section = getattr(config, network)
    waits = config.trainer.total_training_steps - learning_steps(config, network)
    update = max(0, step - 1 - waits) * updates_per_step(config, section)
    return float(section.optim.lr * rate_factor(config, network)(update))


def rate_notes(before: Config, after: Config, done: int) -> Iterator[str]:
    """What another number of steps does to each learning rate, `done` steps into the run; a line each."""
    networks: list[Network] = ["actor"]
    if algorithm_plugin(after.algorithm.name).needs_critic:
        networks.append("critic")
    for network in networks:
        kind, total = getattr(after, network).optim.lr_scheduler_type, after.trainer.total_training_steps
        last, now = rate(before, network, max(1, done)), rate(after, network, done + 1)
        if now == rate(before, network, done + 1):
            yield f"the learning rate of the {network} stays at {now:.3g}"
            continue
        yield (
            f"the {kind} schedule of the {network} is recomputed for {total} steps: its learning rate goes "
            f"from {last:.3g} in step {done} to {now:.3g} in step {done + 1}"
        )
