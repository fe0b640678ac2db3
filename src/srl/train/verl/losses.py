"""Losses of the policy on verl: verl's own where it has one of that name, else ours in verl's terms.

A loss that is added to `srl.update.losses` works on verl without a line here; its keys come from the run's
configuration, as on the local backend.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from torch import Tensor

from srl.train.verl.job import this_config
from srl.update.actor import ActorLoss
from srl.update.losses import LossMode, policy_loss


def register_ours() -> None:
    """Register the losses that verl lacks."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss

    for mode in set(get_args(LossMode)) - set(POLICY_LOSS_REGISTRY):
        from srl.train.rl import actor_loss

        register_policy_loss(mode)(in_verls_terms(replace(actor_loss(this_config()), loss_mode=mode)))


def in_verls_terms(settings: ActorLoss) -> Any:
    """Our loss as verl calls it, for one micro-batch (B, T) of one worker.

    verl averages the gradients of its `dp_size` workers, so each loss is divided by its share of the whole
    mini-batch's tokens or rows.
    """

    def loss(
        old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor,
        loss_agg_mode: str, config: Any, rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
        batch = config.global_batch_info
        by_tokens = settings.normalise == "token-mean"
        size = batch["batch_num_tokens" if by_tokens else "global_batch_size"] / batch["dp_size"]
        if settings.normalise == "constant":
            size *= settings.horizon
        value, metrics = policy_loss(
            log_prob, old_log_prob, advantages, response_mask,
            weights=rollout_is_weights, denominator=size, **settings.of_policy,
        )  # fmt: skip
        return value, {f"actor/{name}": float(metric) for name, metric in metrics.items()}

    return loss
