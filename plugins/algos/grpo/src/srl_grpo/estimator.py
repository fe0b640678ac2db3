"""GRPO's advantages, and the algorithms with them; GSPO and CISPO have another loss of the policy."""

from __future__ import annotations

from functools import partial

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from srl.advantage import (
    Advantages,
    Algorithm,
    group_mean,
    group_std,
    over_tokens,
    sequence_score,
    valid_mask,
)


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    norm_adv_by_std_in_grpo: bool = True
    """Divide by the group's standard deviation. false: Dr. GRPO."""

    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation before dividing."""


@torch.no_grad()
def estimate(
    *,
    token_level_rewards: Tensor,  # (B, T)
    response_mask: Tensor,  # (B, T)
    group_ids: Tensor,  # (B,)
    valid: Tensor,  # (B,)
    group_size: int = 1,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
    **_: object,
) -> Advantages:
    """A = (s − mean) / (std + ε) on every policy token of the row (Shao et al. 2024, arXiv 2402.03300).

    s = Σ r·mask; mean and unbiased std are over the group's valid rows. Without the division it is
    Dr. GRPO (arXiv 2503.20783). With `group_size` 1 A is the raw score. In a larger group, A is 0 if only
    one row is valid or all scores are equal.
    """
    mask = valid_mask(response_mask, valid)
    scores = sequence_score(token_level_rewards, mask)
    advantages = scores
    if group_size > 1:
        advantages = scores - group_mean(scores, group_ids, valid)
        if norm_adv_by_std_in_grpo:
            advantages = advantages / (group_std(scores, group_ids, valid) + epsilon)
    advantages = over_tokens(advantages, mask)
    return Advantages(advantages, advantages)


def grpo(options: Options | None = None) -> Algorithm:
    """GRPO as Search-R1 runs it: five samples per question, k3 in the loss."""
    return _algorithm("grpo", options, {
        "actor.use_kl_loss": True,
        "actor.kl_loss_type": "k3",
        "actor.kl_loss_coef": 0.001,
    })  # fmt: skip


def gspo(options: Options | None = None) -> Algorithm:
    """GSPO (Zheng et al. 2025, arXiv 2507.18071, section 5.1): a ratio for each sequence, clipped closely.

    The clip ranges are the paper's. It has no KL term.
    """
    return _algorithm("gspo", options, {
        "actor.use_kl_loss": False,
        "actor.policy_loss.loss_mode": "gspo",
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
        "actor.loss_agg_mode": "seq-mean-token-mean",
    })  # fmt: skip


def cispo(options: Options | None = None) -> Algorithm:
    """CISPO (MiniMax 2025, arXiv 2506.13585, section 3.1): no token is clipped away, only its weight.

    The weight has no lower bound, as in the paper, which gives no number for the upper one.
    """
    return _algorithm("cispo", options, {
        "actor.use_kl_loss": False,
        "actor.policy_loss.loss_mode": "cispo",
        "actor.clip_ratio_low": 1.0,
        "actor.clip_ratio_high": 4.0,
        "actor.loss_agg_mode": "token-mean",
    })  # fmt: skip


def _algorithm(name: str, options: Options | None, settings: dict[str, object]) -> Algorithm:
    """GRPO's advantages with these settings; a loss that they name is required."""
    mode = settings.get("actor.policy_loss.loss_mode")
    return Algorithm(
        name=name,
        estimator=partial(estimate, **(options or Options()).model_dump()),
        defaults={"rollout.n": 5, "algorithm.use_kl_in_reward": False} | settings,
        requires={"actor.policy_loss.loss_mode": (mode,)} if mode else {},
    )
