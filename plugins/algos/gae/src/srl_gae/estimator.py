"""PPO's advantages: generalised advantage estimation, whitened over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from srl.advantage import Advantages, Algorithm, gae, masked_whiten, valid_mask


@torch.no_grad()
def estimate(
    *,
    token_level_rewards: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T)
    valid: Tensor,  # (B,)
    values: Tensor | None = None,  # (B, T)
    gamma: float = 1.0,
    lam: float = 1.0,
    **_: object,
) -> Advantages:
    """GAE(γ, λ) over the policy's tokens (Schulman et al. 2016), then whitened; needs no groups.

    The returns, which are the critic's targets, use the advantages before whitening.
    """
    if values is None:
        raise ValueError("ppo needs the values of a critic, but got none")
    mask = valid_mask(response_mask, valid)
    advantages, returns = gae(token_level_rewards, values, mask, gamma, lam)
    return Advantages(masked_whiten(advantages, mask), returns)


def ppo() -> Algorithm:
    """PPO as Search-R1 runs it: one sample per question, k1 in the reward."""
    return Algorithm(
        name="ppo",
        estimator=estimate,
        needs_critic=True,
        defaults={
            "rollout.n": 1,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "k1",
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "actor.use_kl_loss": False,
        },
    )
