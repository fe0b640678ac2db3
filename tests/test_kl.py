"""KL estimators, the penalty in the reward, and the controllers of its coefficient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from srl.errors import UserError
from srl.update.kl import AdaptiveKL, FixedKL, kl_controller, kl_penalty, mean_sequence_kl, penalised_rewards

NAN = float("nan")


def two_distributions() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits, log-probs of the policy they make and those of its reference, over ten tokens."""
    generator = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 10, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(-1), reference.log_softmax(-1)


def test_estimators_by_hand():
    logprobs, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    assert_close(kl_penalty(logprobs, reference, "k1"), torch.tensor([0.5]))
    assert_close(kl_penalty(logprobs, reference, "k2"), torch.tensor([0.125]))
    assert_close(kl_penalty(logprobs, reference, "k3"), torch.tensor([math.exp(-0.5) - 1 + 0.5]))


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_the_expectation_of_k1_and_k3_is_the_kl(kind):
    _, policy, reference = two_distributions()
    kl = (policy.exp() * (policy - reference)).sum()
    assert_close((policy.exp() * kl_penalty(policy, reference, kind)).sum(), kl)


def test_the_expected_gradient_of_k2_is_that_of_the_kl():
    logits, policy, reference = two_distributions()
    kl = (policy.exp() * (policy - reference)).sum()
    expected_k2 = (policy.exp().detach() * kl_penalty(policy, reference, "k2")).sum()
    (of_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad(expected_k2, logits)
    assert_close(of_k2, of_kl)


def test_k3_plus_is_k3_with_the_expected_gradient_of_the_kl():
    logits, policy, reference = two_distributions()
    estimate = kl_penalty(policy, reference, "k3+")
    assert_close(estimate, kl_penalty(policy, reference, "k3"))
    kl = (policy.exp() * (policy - reference)).sum()
    (of_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)
    (of_k3_plus,) = torch.autograd.grad((policy.exp().detach() * estimate).sum(), logits)
    assert_close(of_k3_plus, of_kl)


def test_the_expected_gradient_of_k3_is_that_of_the_kl_the_other_way_round():
    logits, policy, reference = two_distributions()
    other = (reference.exp() * (reference - policy)).sum()
    expected = (policy.exp().detach() * kl_penalty(policy, reference, "k3")).sum()
    (of_other,) = torch.autograd.grad(other, logits, retain_graph=True)
    assert_close(torch.autograd.grad(expected, logits)[0], of_other)


def test_the_expected_gradient_of_k1_is_zero():
    logits, policy, reference = two_distributions()
    expected = (policy.exp().detach() * kl_penalty(policy, reference, "k1")).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    assert_close(gradient, torch.zeros_like(logits))


@settings(deadline=None)
@given(a=st.floats(-30, 0), b=st.floats(-30, 0))
def test_k2_and_k3_are_never_negative(a, b):
    for kind in ("k2", "k3"):
        assert kl_penalty(torch.tensor(a), torch.tensor(b), kind) >= 0


def test_k3_keeps_its_precision_where_the_policies_agree():
    tiny = kl_penalty(torch.tensor(-1.0), torch.tensor(-1.001), "k3")
    assert float(tiny) == pytest.approx(0.001**2 / 2, rel=0.01)


def test_a_single_token_cannot_blow_k3_up():
    logprobs = torch.tensor([-500.0, -1.0], requires_grad=True)
    penalty = kl_penalty(logprobs, torch.tensor([-1.0, -500.0]), "k3")
    assert penalty.tolist() == [10.0, 10.0]
    penalty.sum().backward()
    assert logprobs.grad.tolist() == [0, 0]


VERLS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}


@pytest.mark.parametrize(("verl", "ours"), VERLS.items())
def test_verls_names_mean_the_same(verl, ours):
    _, policy, reference = two_distributions()
    assert torch.equal(kl_penalty(policy, reference, verl), kl_penalty(policy, reference, ours))


def test_an_unknown_estimator_is_one_clear_line():
    with pytest.raises(UserError, match=r"no KL estimator 'k4': k1, k2, k3 and k3\+ exist; did you mean"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k4")


def test_the_penalty_is_taken_off_the_policys_tokens_only():
    rewards, kl = torch.tensor([[0.0, 5.0, 1.0]]), torch.tensor([[2.0, NAN, -3.0]])
    penalised = penalised_rewards(rewards, kl, torch.tensor([[1, 0, 1]]), coef=0.1)
    assert_close(penalised, torch.tensor([[-0.2, 5.0, 1.3]]))


def test_mean_kl_weighs_rows_alike_and_leaves_out_those_that_do_not_count():
    kl = torch.tensor([[1.0, 3.0, NAN], [6.0, NAN, NAN], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert mean_sequence_kl(kl, mask) == (2 + 6) / 2


def test_a_fixed_coefficient_stays_whatever_is_measured_or_loaded():
    controller = kl_controller("fixed", 0.001)
    controller.update(kl=100.0, sequences=64)
    controller.load_state_dict({"coef": 7.0})
    assert controller == FixedKL(0.001)
    assert controller.state_dict() == {}


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1 + 0.1 * 0.5), (0.09, 1 - 0.1 * 0.5), (9.0, 1.1), (0.0, 0.9)]
)
def test_the_adaptive_coefficient_follows_the_error_clipped_at_a_fifth(kl, factor):
    controller = kl_controller("adaptive", 0.2, target=0.1, horizon=100)
    controller.update(kl=kl, sequences=50)
    assert controller.coef == pytest.approx(0.2 * factor)


def test_an_adaptive_coefficient_survives_a_resume():
    before, after = AdaptiveKL(0.2, 0.1, 1000), AdaptiveKL(0.2, 0.1, 1000)
    before.update(kl=0.5, sequences=100)
    after.load_state_dict(before.state_dict())
    assert after == before


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"horizon": -1}])
def test_an_adaptive_controller_wants_a_target_and_a_horizon(wrong):
    with pytest.raises(UserError, match="above 0"):
        kl_controller("adaptive", 0.1, **wrong)


def test_an_unknown_controller_is_one_clear_line():
    with pytest.raises(UserError, match="fixed or adaptive"):
        kl_controller("linear", 0.1)


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_a_kl_that_is_not_finite_leaves_the_coefficient(kl):
    controller = AdaptiveKL(0.2, 0.1, 1000)
    controller.update(kl, 100)
    assert controller.coef == 0.2
