"""Functions over the policy's tokens: masked sums and means, rewards of tokens, returns."""

from __future__ import annotations

import torch
from torch import Tensor


def valid_mask(response_mask: Tensor, valid: Tensor) -> Tensor:
    """The policy's tokens (B, T) as bool; all False in rows with `valid` 0."""
    return response_mask.bool() & valid.bool().unsqueeze(-1)  # (B, T)


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum where the mask is 1; other values, even NaN, are never read."""
    return values.masked_fill(~mask.bool(), 0).sum(dim=dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean where the mask is 1; 0 if it is 0 everywhere."""
    return masked_sum(values, mask, dim) / mask.bool().sum(dim=dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance (n − 1) where the mask is 1, a scalar; 0 for fewer than two values."""
    squares = (values - masked_mean(values, mask)).square()
    return masked_sum(squares, mask) / (mask.bool().sum() - 1).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """(x − mean) / √(var + ε) over all tokens with mask 1, and 0 elsewhere."""
    centred = values - masked_mean(values, mask)
    return (centred * torch.rsqrt(masked_var(values, mask) + epsilon)).masked_fill(~mask.bool(), 0)


def last_policy_token(mask: Tensor) -> Tensor:
    """The index (B,) of each row's last token with mask 1, or −1 in a row without any."""
    positions = torch.arange(1, mask.shape[-1] + 1, device=mask.device)  # (T,)
    return (positions * mask.bool()).amax(dim=-1) - 1  # (B,)


def score_on_last_token(scores: Tensor, mask: Tensor) -> Tensor:
    """Token rewards (B, T) with each row's score on its last policy token and 0 elsewhere.

    A row without a policy token gets no score.
    """
    positions = torch.arange(mask.shape[-1], device=mask.device)  # (T,)
    here = positions == last_policy_token(mask).unsqueeze(-1)  # (B, T)
    return over_tokens(scores, here)  # (B, T)


def sequence_score(token_level_rewards: Tensor, mask: Tensor) -> Tensor:
    """Σ_t r_t·mask_t for each row (B,). Rewards on tokens with mask 0 do not count."""
    return masked_sum(token_level_rewards, mask, dim=-1)  # (B,)


def over_tokens(scores: Tensor, mask: Tensor) -> Tensor:
    """Each row's number on every token with mask 1, and 0 elsewhere."""
    return scores.unsqueeze(-1).expand(mask.shape).masked_fill(~mask.bool(), 0)  # (B, T)


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
