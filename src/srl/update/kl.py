"""KL divergence from the reference policy: estimators, reward penalty, and its coefficient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from srl.advantage import masked_mean
from srl.errors import UserError, nearest

VERL_NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "k3") -> Tensor:
    """A one-sample estimate of KL(π ‖ π_ref) for each token, with d = log π − log π_ref.

        k1 = d        k2 = d²/2        k3 = exp(−d) − 1 + d

    Schulman 2020, http://joschu.net/blog/kl-approx.html. verl's names `kl`, `mse` and `low_var_kl`
    mean the same. k3+ has the value of k3 and the gradient of k2, straight through: on policy the expected
    gradient of k2 is that of the KL, and that of k3 is that of KL(π_ref ‖ π). As in verl, k3 clamps d to
    ±20 and the result to at most 10, so a single token cannot overflow; a clamped token has no gradient.
    Raises UserError for another name.
    """
    kind = VERL_NAMES.get(kind, kind)
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "k2":
        return 0.5 * difference.square()
    if kind == "k3":
        bounded = difference.clamp(-20.0, 20.0)
        return (torch.expm1(-bounded) + bounded).clamp(max=10.0)
    if kind == "k3+":
        half_square = 0.5 * difference.square()
        return half_square - half_square.detach() + kl_penalty(logprobs, ref_logprobs, "k3").detach()
    kinds = ["k1", "k2", "k3", "k3+"]
    raise UserError(f"no KL estimator {kind!r}: k1, k2, k3 and k3+ exist{nearest(kind, kinds)}")


def penalised_rewards(token_rewards: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """r_t − β·KL_t on tokens with mask 1; the rewards of other tokens stay as they are.

    Ziegler et al. 2019, eq. 2, token by token (arXiv 1909.08593).
    """
    return token_rewards - coef * kl.masked_fill(~mask.bool(), 0)  # (B, T)


def mean_sequence_kl(kl: Tensor, mask: Tensor) -> Tensor:
    """The measure that a controller follows: the mean over rows of each row's mean over policy tokens.

    Rows without a policy token, or with `valid` 0, are left out.
    """
    return masked_mean(masked_mean(kl, mask, dim=-1), mask.bool().any(dim=-1))


@dataclass
class FixedKL:
    """A constant β, the configured one also after a resume."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """β is constant."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load."""


@dataclass
class AdaptiveKL:
    """A proportional controller in log space, which moves β so that the measured KL approaches `target`.

        e = clip(KL / target − 1, −0.2, 0.2)        β ← β·(1 + e·n / horizon)

    Ziegler et al. 2019 (arXiv 1909.08593), where K_β = n / horizon; n counts sequences. A KL that is not
    finite leaves β as it is.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, sequences: int) -> None:
        if math.isfinite(kl):
            error = min(max(kl / self.target - 1.0, -0.2), 0.2)
            self.coef *= 1.0 + error * sequences / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


KLController = FixedKL | AdaptiveKL
"""Holds β, the coefficient of the penalty, between steps."""


def kl_controller(
    kind: Literal["fixed", "adaptive"], coef: float, target: float = 0.1, horizon: float = 10_000
) -> KLController:
    """The controller that `algorithm.kl_ctrl` configures. Raises UserError."""
    if kind == "fixed":
        return FixedKL(coef)
    if kind != "adaptive":
        raise UserError(f"no KL controller {kind!r}: it is fixed or adaptive")
    if target <= 0 or horizon <= 0:
        raise UserError(
            f"an adaptive KL coefficient needs target_kl and horizon above 0, not {target:g} and {horizon:g}"
        )
    return AdaptiveKL(coef, target, horizon)
