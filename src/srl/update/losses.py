"""Losses: pure functions of tensors (B, T) that return `(loss, metrics)`.

A loss is a sum over tokens, divided by a `denominator` that the caller counts over the whole mini-batch
(`count_for`). So the losses of its micro-batches add up exactly to the mini-batch's loss, and so do their
gradients. Metrics add up in the same way: they are sums over the policy's tokens, divided by `tokens`, the
number of policy tokens of the mini-batch. Without `denominator` or `tokens` the given tensors are the whole
mini-batch.

Values where the mask is 0 are never read and get no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from srl.advantage import masked_sum

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
LossMode = Literal["vanilla", "gspo", "cispo"]
"""Losses of the policy, with verl's names."""
Metrics = dict[str, Tensor]

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before `exp`, as in verl: e^20 is finite in every dtype but half."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""The bound of a sequence's log-ratio in GSPO, as in verl."""


def count_for(mask: Tensor, normalise: LossAggMode = "token-mean", horizon: int | None = None) -> float:
    """The denominator of `aggregate` for a mini-batch with this policy mask (B, T).

    `token-mean`: its policy tokens. The sequence means: its rows with a policy token. `constant`:
    those rows times `horizon`, the longest response allowed, or T when it is not given. At least 1.
    """
    if normalise == "token-mean":
        return float(max(int(mask.bool().sum()), 1))
    sequences = float(max(int(mask.bool().any(dim=-1).sum()), 1))
    if normalise == "constant":
        return sequences * (horizon or mask.shape[-1])
    return sequences


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    *,
    normalise: LossAggMode = "token-mean",
    denominator: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """One number from losses per token (B, T), with N the `denominator` of the whole mini-batch.

        token-mean           Σ_b Σ_t m·ℓ / N              N: policy tokens (DAPO, verl's default)
        seq-mean-token-mean  Σ_b (Σ_t m·ℓ / n_b) / N      N: sequences (GRPO); n_b from `lengths` (B,)
        seq-mean-token-sum   Σ_b Σ_t m·ℓ / N              N: sequences
        constant             Σ_b Σ_t m·ℓ / N              N: sequences · horizon (Dr. GRPO)

    `lengths` and `denominator` default to those of `mask`. Where `mask` is wider because retrieved tokens are
    trained on too, pass those of the policy's mask: the loss then keeps its scale.
    """
    if denominator is None:
        denominator = count_for(mask, normalise)
    rows = masked_sum(per_token, mask, dim=-1)  # (B,)
    if normalise == "seq-mean-token-mean":
        lengths = mask.bool().sum(dim=-1) if lengths is None else lengths
        rows = rows / lengths.clamp(min=1)
    return rows.sum() / denominator


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
    weights: Tensor | None = None,
    normalise: LossAggMode = "token-mean",
    denominator: float | None = None,
    tokens: float | None = None,
    loss_mask: Tensor | None = None,
    loss_mode: LossMode = "vanilla",
) -> tuple[Tensor, Metrics]:
    """The loss of the policy, with ρ = π(token) / π_old(token), by `loss_mode`.

    vanilla, PPO's clipped objective:

        ℓ = max(−ρ·A, −clip(ρ, 1 − clip_low, 1 + clip_high)·A)      and, where A < 0, at most −c·A

    Schulman et al. 2017, eq. 7; c is the dual clip of Ye et al. 2020 (arXiv 1912.09729), `None` for
    none; clip_high above clip_low is DAPO's (arXiv 2503.14476).

    gspo has the sequence's ratio s in the place of ρ, without a dual clip: |y| are the policy's tokens of the
    row, and sg keeps a gradient out (Zheng et al. 2025, arXiv 2507.18071, eq. 5, 7 and 14):

        s = exp(1/|y| · Σ_t log ρ_t)            s_t = sg(s) · π(token) / sg(π(token))
        ℓ = max(−s_t·A, −clip(s_t, 1 − clip_low, 1 + clip_high)·A)

    cispo clips the weight of a token, which keeps its gradient (MiniMax 2025, arXiv 2506.13585, eq. 4 and 5):

        ℓ = −sg(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π(token)

    `weights` (B, T) multiply ℓ (`srl.update.rollout_correction`). `loss_mask`, which contains `mask`, widens
    the loss beyond the policy's tokens while the count it is divided by, and the metrics, stay those of
    `mask`.
    """
    counted = mask if loss_mask is None else loss_mask
    log_ratio = _log_ratio(logprobs, old_logprobs)
    advantages = advantages.masked_fill(~counted.bool(), 0)
    if loss_mode == "gspo":
        bound = _of_sequence(logprobs, logprobs - old_logprobs, mask, counted).exp()
        objective = _clipped_objective(bound, advantages, clip_low, clip_high, None)
    elif loss_mode == "cispo":
        objective = _clipped_weights(logprobs, log_ratio.exp(), advantages, counted, clip_low, clip_high)
    else:
        objective = _clipped_objective(log_ratio.exp(), advantages, clip_low, clip_high, clip_c)
    per_token = objective.per_token
    if weights is not None:
        per_token = per_token * weights
    loss = aggregate(
        per_token,
        counted,
        normalise=normalise,
        denominator=count_for(mask, normalise) if denominator is None else denominator,
        lengths=mask.bool().sum(dim=-1),
    )
    watched = {
        "pg_clipfrac": objective.clipped,
        "pg_clipfrac_lower": objective.lowered,
        "ppo_kl": -log_ratio,
        "ratio_mean": log_ratio.exp(),
    }
    return loss, _shares(watched, mask, tokens)


@dataclass(frozen=True, slots=True)
class _Objective:
    """The loss of each token, where the clip changed it, and where the dual clip lowered it; all (B, T)."""

    per_token: Tensor
    clipped: Tensor
    lowered: Tensor


def _clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_c: float | None
) -> _Objective:
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    upper = torch.maximum(plain, clipped)
    ceiling = _dual_clip_ceiling(advantages, clip_c)
    return _Objective(torch.minimum(upper, ceiling), clipped > plain, upper > ceiling)


def _of_sequence(logprobs: Tensor, log_ratio: Tensor, mask: Tensor, counted: Tensor) -> Tensor:
    """log s_t of GSPO (B, T): the mean log-ratio of the row, with the gradient of the token's log-prob."""
    mean = masked_sum(log_ratio, mask, dim=-1) / mask.bool().sum(dim=-1).clamp(min=1)
    logprob = logprobs.masked_fill(~counted.bool(), 0)
    return (logprob - logprob.detach() + mean.detach().unsqueeze(-1)).clamp(max=MAX_SEQUENCE_LOG_RATIO)


def _clipped_weights(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, counted: Tensor, clip_low: float, clip_high: float
) -> _Objective:
    weight = ratio.clamp(1 - clip_low, 1 + clip_high).detach()
    per_token = -weight * advantages * logprobs.masked_fill(~counted.bool(), 0)
    return _Objective(per_token, weight != ratio, torch.zeros_like(ratio, dtype=torch.bool))


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = 0.5,
    normalise: LossAggMode = "token-mean",
    denominator: float | None = None,
    tokens: float | None = None,
) -> tuple[Tensor, Metrics]:
    """Half the squared error, the worse of the value and the value kept within ± clip of the old one.

        ℓ = ½·max((V − R)², (clip(V, V_old − clip, V_old + clip) − R)²)

    The value clip of PPO's reference implementation (baselines' ppo2); `None` for no clip.
    """
    values = values.masked_fill(~mask.bool(), 0)
    plain = (values - returns).square()
    bounded = values if clip is None else values.clamp(old_values - clip, old_values + clip)
    clipped = (bounded - returns).square()
    per_token = 0.5 * torch.maximum(plain, clipped)
    loss = aggregate(per_token, mask, normalise=normalise, denominator=denominator)
    return loss, _shares({"vf_clipfrac": clipped > plain, "vpred_mean": values}, mask, tokens)


def sft_loss(
    logprobs: Tensor, weights: Tensor, *, denominator: float | Tensor | None = None
) -> tuple[Tensor, Metrics]:
    """Weighted cross-entropy Σ w·(−log π(token)) / Σ w.

    `weights` (B, T): 1 on what the demonstrator wrote, less or 0 on what it read, 0 elsewhere.
    `denominator` is Σ w of the mini-batch. The metric `nll` is the loss without its gradient.
    """
    if denominator is None:
        denominator = weights.sum().clamp(min=1e-8)
    per_token = -logprobs.masked_fill(weights == 0, 0) * weights
    loss = per_token.sum() / denominator
    return loss, {"nll": loss.detach()}


def _log_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _dual_clip_ceiling(advantages: Tensor, clip_c: float | None) -> Tensor:
    """The largest loss of a token: c·|A| where A < 0, infinite elsewhere."""
    unlimited = torch.full_like(advantages, torch.inf)
    return unlimited if clip_c is None else torch.where(advantages < 0, -clip_c * advantages, unlimited)


def _shares(watched: dict[str, Tensor], mask: Tensor, tokens: float | None) -> Metrics:
    """Each quantity's sum over the policy's tokens, divided by the mini-batch's number of them."""
    count = count_for(mask) if tokens is None else tokens
    return {name: masked_sum(value.detach().float(), mask) / count for name, value in watched.items()}
