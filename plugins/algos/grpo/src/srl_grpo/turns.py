"""Turn-level credit: the return from each turn on, minus what the question's other samples got from there."""

from __future__ import annotations

import torch
from torch import Tensor

from srl.advantage import Advantages, Algorithm, group_count, leave_one_out_mean, valid_mask


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
    """A = G_k − b_k on every policy token of turn k, with G_k the sum of the rewards from turn k on.

    b_k is the mean G_k of the group's other valid rows that took a turn k. Where no other did, it is their
    mean return from the first turn on, minus what this row got before turn k. So b_k depends on other rows
    and on this row's past, never on its turn k or what comes after: E[b_k·∇ log π(turn k)] = 0, and the
    gradient has no bias, also where the policy decides how many turns there are.

    Normalising the rewards of each turn index in the group and adding them up from turn k on (the natural
    extension of MT-GRPO, Wei et al. 2025, arXiv 2505.11821) subtracts one mean for each turn that this row
    still takes. That baseline depends on when the row stops: each further turn costs its mean reward, so
    that the gradient is that of the return minus these means (verl's issue 7244; docs/algorithms.md).

    A turn is a run of tokens with mask 1. With one turn, or with a reward at the end only and equally many
    turns, it is RLOO. With `group_size` 1 A is G_k. In a larger group a row that is alone has A = 0.
    """
    mask = valid_mask(response_mask, valid)
    turns = _turns(mask)
    returns = _returns(token_level_rewards, mask, turns)
    advantages = torch.zeros_like(token_level_rewards)
    for turn in range(1, returns.shape[1]):
        column = returns[:, turn]
        if group_size > 1:
            column = column - _baseline(returns, turn, (turns == turn).any(1), group_ids, valid)
        advantages = torch.where(turns == turn, column.unsqueeze(-1), advantages)
    back = returns.gather(1, turns).masked_fill(~mask, 0)
    return Advantages(advantages, back)


def _turns(mask: Tensor) -> Tensor:
    """The number (B, T) of each policy token's turn, from 1; 0 on other tokens."""
    starts = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return starts.long().cumsum(1) * mask


def _returns(rewards: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
    """The sum of the rewards (B, K + 1) from each turn on, by its number; column 0 is that of the episode."""
    each = rewards.new_zeros(len(rewards), int(turns.max()) + 1 if turns.numel() else 1)
    each = each.scatter_add(1, turns, rewards.masked_fill(~mask, 0))
    return each.flip(1).cumsum(1).flip(1)


def _baseline(returns: Tensor, turn: int, reached: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """What (B,) the other rows say about the return from `turn` on; the row's own return if it is alone."""
    whole, own = returns[:, 0], returns[:, turn]
    there = leave_one_out_mean(own, group_ids, reached)
    anywhere = leave_one_out_mean(whole, group_ids, valid) - (whole - own)
    return torch.where(group_count(group_ids, reached) > 1, there, anywhere)


def turn_rloo() -> Algorithm:
    """RLOO with a baseline for each turn; the KL is in the loss, so that rewards of turns stay apart."""
    return Algorithm(
        name="turn_rloo",
        estimator=estimate,
        defaults={
            "rollout.n": 5,
            "algorithm.use_kl_in_reward": False,
            "actor.use_kl_loss": True,
            "actor.kl_loss_type": "k3",
            "actor.kl_loss_coef": 0.001,
        },
        requires={"actor.mask_observations": (True,)},
    )
