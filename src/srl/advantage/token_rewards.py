"""A score for each row becomes a reward for each token, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from srl.advantage.masked import masked_sum


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
