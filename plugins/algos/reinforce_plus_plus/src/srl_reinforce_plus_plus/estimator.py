"""REINFORCE++'s advantages: returns-to-go, whitened over all policy tokens of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from srl.advantage import Advantages, Algorithm, discounted_returns, masked_whiten, valid_mask


@torch.no_grad()
def estimate(
    *,
    token_level_rewards: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T)
    valid: Tensor,  # (B,)
    gamma: float = 1.0,
    **_: object,
) -> Advantages:
    """A = whiten(G), G_t = r_t + γ·G of the next policy token (Hu 2025, arXiv 2501.03262); no groups."""
    mask = valid_mask(response_mask, valid)
    returns = discounted_returns(token_level_rewards, mask, gamma)
    return Advantages(masked_whiten(returns, mask), returns)


def algorithm() -> Algorithm:
    """REINFORCE++ with the KL in the reward, as in its paper."""
    return Algorithm(
        name="reinforce_plus_plus",
        estimator=estimate,
        defaults={
            "rollout.n": 1,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "k1",
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "actor.use_kl_loss": False,
        },
    )
