"""Gradients in float64 against finite differences."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from srl.update.kl import kl_penalty
from srl.update.losses import aggregate, policy_loss, sft_loss, value_loss
from srl.update.rollout_correction import RolloutCorrection

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]


def random(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (3, 8)), generator=generator, dtype=torch.float64)


MASK = (random(0) > -0.4).long()


def central_differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6) -> Tensor:
    """(f(x + h) − f(x − h)) / 2h for each entry of x."""
    slopes = []
    for index in range(at.numel()):
        nudge = torch.zeros_like(at).flatten()
        nudge[index] = step
        nudge = nudge.view_as(at)
        slopes.append((function(at + nudge) - function(at - nudge)) / (2 * step))
    return torch.stack(slopes).view_as(at)


def assert_gradient_is_the_slope(function: Callable[[Tensor], Tensor], at: Tensor) -> None:
    at = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(at), at)
    assert gradient.abs().max() > 0
    assert_close(gradient, central_differences(function, at.detach()), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("normalise", MODES)
@pytest.mark.parametrize("clip_c", [None, 3.0])
def test_policy_loss(normalise, clip_c):
    weights = RolloutCorrection("token").weights(random(1), random(2), MASK)
    assert_gradient_is_the_slope(
        lambda logprobs: policy_loss(
            logprobs, random(4), random(5), MASK, clip_c=clip_c, weights=weights, normalise=normalise
        )[0],
        random(3),
    )


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_loss(clip):
    assert_gradient_is_the_slope(
        lambda values: value_loss(values, random(7), random(8), MASK, clip=clip)[0], random(6)
    )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_penalty(kind):
    assert_gradient_is_the_slope(
        lambda logprobs: aggregate(kl_penalty(logprobs, random(10), kind), MASK), random(9)
    )


def test_sft_loss():
    assert_gradient_is_the_slope(lambda logprobs: sft_loss(logprobs, MASK * 0.5)[0], random(12))
