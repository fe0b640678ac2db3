"""Generalised advantage estimation and discounted returns over the policy's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(token_level_rewards: Tensor, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Return-to-go G_t = r_t + γ·G_t′, where t′ is the row's next policy token.

    γ counts policy tokens only: spans with mask 0 are skipped, their rewards do not count, and their
    returns are 0.
    """
    keep = mask.bool()
    returns = torch.zeros_like(token_level_rewards)
    running = torch.zeros_like(token_level_rewards[:, 0])
    for t in reversed(range(token_level_rewards.shape[-1])):
        running = torch.where(keep[:, t], token_level_rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    return returns.masked_fill(~keep, 0)  # (B, T)


def gae(
    token_level_rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16) over the policy's tokens.

        δ_t = r_t + γ·V_t′ − V_t        A_t = δ_t + γλ·A_t′        returns_t = A_t + V_t

    V_t is the value before token t, and t′ is the row's next policy token; V and A after the last one are 0.
    Spans with mask 0 are skipped and their rewards do not count. Returns (advantages, returns), each (B, T),
    not whitened, 0 where the mask is 0.
    """
    keep = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[-1])):
        delta = token_level_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(keep[:, t], delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(keep[:, t], values[:, t], next_value)
        advantages[:, t] = next_advantage
    return advantages.masked_fill(~keep, 0), (advantages + values).masked_fill(~keep, 0)  # (B, T)
