"""RLOO's advantages: the score minus the mean score of the group's other rows."""

from __future__ import annotations

import torch
from torch import Tensor

from srl.advantage import (
    Advantages,
    Algorithm,
    leave_one_out_mean,
    over_tokens,
    sequence_score,
    valid_mask,
)


@torch.no_grad()
def estimate(
    *,
    token_level_rewards: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T)
    group_ids: Tensor,  # (B,)
    valid: Tensor,  # (B,)
    group_size: int = 1,
    **_: object,
) -> Advantages:
    """A = s − mean of the group's other valid rows, on every policy token of the row.

    Ahmadian et al. 2024, arXiv 2402.14740; s = Σ r·mask. With `group_size` 1 A is the raw score. In a
    larger group, A is 0 if only one row is valid or all scores are equal.
    """
    mask = valid_mask(response_mask, valid)
    scores = sequence_score(token_level_rewards, mask)
    advantages = scores
    if group_size > 1:
        advantages = scores - leave_one_out_mean(scores, group_ids, valid)
    advantages = over_tokens(advantages, mask)
    return Advantages(advantages, advantages)


def rloo() -> Algorithm:
    """RLOO with the KL in the reward, as in its paper."""
    return Algorithm(
        name="rloo",
        estimator=estimate,
        defaults={
            "rollout.n": 5,
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_penalty": "k1",
            "algorithm.kl_ctrl.kl_coef": 0.001,
            "actor.use_kl_loss": False,
        },
    )
