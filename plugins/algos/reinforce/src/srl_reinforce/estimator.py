"""Advantages of REINFORCE and REINFORCE++: the return-to-go of each token, perhaps normalised."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from srl.advantage import (
    Advantages,
    Algorithm,
    discounted_returns,
    masked_mean,
    masked_whiten,
    valid_mask,
)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    normalise: Literal["none", "centre", "whiten"] = "none"
    """Normalisation of the returns over all policy tokens of the batch: none, centre (subtract the mean)
    or whiten (also divide by the standard deviation)."""


@torch.no_grad()
def estimate(
    *,
    token_level_rewards: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T)
    valid: Tensor,  # (B,)
    gamma: float = 1.0,
    normalise: str = "none",
    **_: object,
) -> Advantages:
    """A_t = G_t = Σ_{k ≥ 0} γ^k·r_{t+k} over policy tokens (Williams 1992); needs no groups.

    `centre` subtracts the mean of G over the batch's policy tokens; `whiten` also divides by the standard
    deviation.
    """
    mask = valid_mask(response_mask, valid)
    returns = discounted_returns(token_level_rewards, mask, gamma)
    advantages = returns
    if normalise == "centre":
        advantages = (returns - masked_mean(returns, mask)).masked_fill(~mask, 0)
    elif normalise == "whiten":
        advantages = masked_whiten(returns, mask)
    return Advantages(advantages, returns)


def reinforce(options: Options | None = None) -> Algorithm:
    """What Search-R1 calls REINFORCE: GRPO's settings with one sample per question."""
    return Algorithm(
        name="reinforce",
        estimator=partial(estimate, **(options or Options()).model_dump()),
        defaults={
            "rollout.n": 1,
            "algorithm.use_kl_in_reward": False,
            "actor.use_kl_loss": True,
            "actor.kl_loss_type": "k3",
            "actor.kl_loss_coef": 0.001,
        },
    )


def reinforce_plus_plus() -> Algorithm:
    """REINFORCE++ (Hu 2025, arXiv 2501.03262): the returns whitened, and the KL in the reward."""
    return Algorithm(
        name="reinforce_plus_plus",
        estimator=partial(estimate, normalise="whiten"),
        defaults={
            "rollout.n": 1,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "k1",
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "actor.use_kl_loss": False,
        },
    )
