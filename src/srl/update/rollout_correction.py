"""Corrections for a sampler whose probabilities differ from the trainer's, and how far the two are apart.

ρ = π_trainer / π_sampler of a sampled token, both at the sampling temperature. Importance weights multiply
the loss. Options, equations and metrics (`rollout_corr/…`) are those of verl's
`algorithm.rollout_correction`. All tensors are (B, T); values where the mask is 0 are never read, and nothing
here has a gradient.

Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Liu et al. 2025,
"When speed kills stability: demystifying RL collapse from the training-inference mismatch".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from srl.advantage import masked_mean, masked_sum
from srl.update.losses import MAX_LOG_RATIO, Metrics

Level = Literal["token", "sequence"]


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """Which importance weights. The default changes nothing and only measures.

    `level` is that of the weights: ρ of each token, or the product of a sequence's. Weights are truncated
    at `upper`; with `lower`, those outside [lower, upper] are 0 instead (IcePop).
    """

    level: Level | None = None
    upper: float = 2.0
    lower: float | None = None

    def weights(self, trainer: Tensor, sampler: Tensor, mask: Tensor) -> Tensor | None:
        """The weights (B, T) for these log-probs, 1 off the mask; None without a level."""
        if self.level is None:
            return None
        ratio = _ratios(_log_ratio(trainer, sampler, mask), mask, self.level)
        weights = truncated(ratio, self.upper, self.lower)
        return weights.masked_fill(~mask.bool(), 1.0)

    def metrics(self, trainer: Tensor, sampler: Tensor, mask: Tensor) -> dict[str, float]:
        """`rollout_corr/…` of verl: how far sampler and trainer are apart, and what was done about it.

        Rows without a policy token do not count. Empty if no row has one.
        """
        rows = mask.bool().any(dim=-1)
        if not bool(rows.any()):
            return {}
        trainer, sampler, mask = trainer[rows], sampler[rows], mask[rows]
        metrics = _mismatch(trainer, sampler, mask)
        if self.level is not None:
            log_ratio = _log_ratio(trainer, sampler, mask)
            metrics |= _weight_metrics(log_ratio, mask, self.level, self.upper, self.lower)
        return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


NO_CORRECTION = RolloutCorrection()
"""Measures, and changes nothing."""


def truncated(ratios: Tensor, upper: float, lower: float | None = None) -> Tensor:
    """min(ρ, upper) (Ionides 2008); with `lower`, ρ inside [lower, upper] and 0 outside (IcePop)."""
    if lower is None:
        return ratios.clamp(max=upper)
    return ratios.where((ratios >= lower) & (ratios <= upper), 0.0)


def _log_ratio(trainer: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """log ρ where the mask is 1, and 0 elsewhere."""
    return (trainer.detach() - sampler.detach()).masked_fill(~mask.bool(), 0.0)


def _ratios(log_ratio: Tensor, mask: Tensor, level: Level) -> Tensor:
    """ρ of each token, or the product over its sequence in every place."""
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _mismatch(trainer: Tensor, sampler: Tensor, mask: Tensor) -> Metrics:
    """KL(sampler ‖ trainer) by k1 and k3, both perplexities, and the differences of their logarithms."""
    log_ratio = _log_ratio(trainer, sampler, mask)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    trainer_nll, sampler_nll = (-masked_mean(each, mask, dim=-1) for each in (trainer, sampler))  # (B,)
    return {
        "kl": masked_mean(-log_ratio, mask),
        "k3_kl": masked_mean(torch.expm1(bounded) - bounded, mask),
        "training_ppl": trainer_nll.exp().mean(),
        "rollout_ppl": sampler_nll.exp().mean(),
        "log_ppl_diff": (trainer_nll - sampler_nll).mean(),
        "log_ppl_abs_diff": (trainer_nll - sampler_nll).abs().mean(),
    }


def _weight_metrics(
    log_ratio: Tensor, mask: Tensor, level: Level, upper: float, lower: float | None
) -> Metrics:
    """Mean and extremes of the weights, effective sample size, and shares out of bounds; not normalised.

    The effective sample size is (Σ w)² / (n · Σ w²), in (0, 1], and 0 if every weight is. The shares are of
    tokens, or of sequences; `low` is below `lower`, or below 1 / upper. Extremes of sequences are those of ρ.
    """
    ratios = _ratios(log_ratio, mask, level)
    weights = truncated(ratios, upper, lower)
    shares, on = (ratios, mask) if level == "token" else (ratios[:, :1], mask.bool().any(-1, keepdim=True))
    counted = (weights if level == "token" else ratios)[mask.bool()]
    mean, square = masked_mean(weights, mask), masked_mean(weights.square(), mask)
    return {
        "rollout_is_mean": mean,
        "rollout_is_max": counted.max(),
        "rollout_is_min": counted.min(),
        "rollout_is_eff_sample_size": torch.where(square > 0, mean.square() / square, 0.0).clamp(max=1.0),
        "rollout_is_ratio_fraction_high": masked_mean((shares > upper).float(), on),
        "rollout_is_ratio_fraction_low": masked_mean((shares < (lower or 1 / upper)).float(), on),
    }
