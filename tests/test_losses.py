"""Losses against numbers worked out by hand, and the facts that make them safe to split and pad."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from srl.update.losses import aggregate, count_for, policy_loss, sft_loss, value_loss

NAN = float("nan")
MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
NUMBERS = ["logprobs", "old_logprobs", "advantages", "values", "old_values", "returns"]
every_mode = pytest.mark.parametrize("normalise", MODES)
seeds = st.integers(0, 2**31)
fast = settings(max_examples=30, deadline=None)


def make_batch(seed: int, rows: int = 5, tokens: int = 7) -> dict[str, Tensor]:
    """Random log-probs, advantages, values and a mask with gaps; the last row may be without a token."""
    generator = torch.Generator().manual_seed(seed)

    def random() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    mask = (random() > -0.3).long()
    mask[-1] *= seed % 2
    return {"mask": mask} | {name: random() for name in NUMBERS}


def both_losses(batch: dict[str, Tensor], **options: object) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy loss plus value loss, and the metrics of both."""
    policy = [batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    value = [batch[name] for name in ("values", "old_values", "returns", "mask")]
    (pg_loss, pg_metrics), (vf_loss, vf_metrics) = (
        policy_loss(*policy, **options),
        value_loss(*value, **options),
    )
    return pg_loss + vf_loss, pg_metrics | vf_metrics


def with_gradients(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    learned = {name: batch[name].clone().requires_grad_() for name in ("logprobs", "values")}
    return batch | learned


def four_ratios() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ratios = torch.tensor([[1.5, 0.5, 0.5, 5.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]], dtype=torch.float64)
    return ratios.log().requires_grad_(), torch.zeros_like(ratios), advantages, torch.ones(1, 4)


def test_policy_loss_by_hand():
    loss, metrics = policy_loss(*four_ratios())
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 0.8 + 3.0) / 4)
    assert float(metrics["pg_clipfrac"]) == 2 / 4
    assert float(metrics["pg_clipfrac_lower"]) == 1 / 4
    assert float(metrics["ratio_mean"]) == pytest.approx((1.5 + 0.5 + 0.5 + 5.0) / 4)
    assert float(metrics["ppo_kl"]) == pytest.approx(-math.log(1.5 * 0.5 * 0.5 * 5.0) / 4)


def test_a_clipped_token_has_no_gradient():
    logprobs, old, advantages, mask = four_ratios()
    policy_loss(logprobs, old, advantages, mask)[0].backward()
    assert_close(logprobs.grad, torch.tensor([[0.0, -0.5 / 4, 0.0, 0.0]], dtype=torch.float64))


def test_without_dual_clip_a_bad_token_costs_its_whole_ratio():
    loss, metrics = policy_loss(*four_ratios(), clip_c=None)
    assert loss.item() == pytest.approx((-1.2 - 0.5 + 0.8 + 5.0) / 4)
    assert float(metrics["pg_clipfrac_lower"]) == 0


def test_gspo_by_hand():
    """Two rows with mean log-ratios log 1.5 and log .5; each token of a row gets the same gradient."""
    ratios = torch.tensor([[2.25, 1.0], [0.25, 1.0]], dtype=torch.float64)
    logprobs, old = ratios.log().requires_grad_(), torch.zeros_like(ratios)
    advantages = torch.tensor([[-1.0], [1.0]]).expand(2, 2).double()
    loss, metrics = policy_loss(
        logprobs, old, advantages, torch.ones(2, 2), loss_mode="gspo", normalise="seq-mean-token-mean"
    )
    assert loss.item() == pytest.approx((1.5 - 0.5) / 2)
    loss.backward()
    assert_close(logprobs.grad, torch.tensor([[1.5, 1.5], [-0.5, -0.5]]).double() / 4)
    assert float(metrics["pg_clipfrac"]) == 0
    clipped, metrics = policy_loss(logprobs, old, -advantages, torch.ones(2, 2), loss_mode="gspo")
    assert clipped.item() == pytest.approx((-1.2 + 0.8) / 2)
    assert float(metrics["pg_clipfrac"]) == 1
    assert torch.autograd.grad(clipped, logprobs)[0].abs().max() == 0


def test_cispo_by_hand():
    """Weights 1.5, .5, .5 and 5 are clipped to 1.2, .8, .8 and 1.2, and all tokens keep a gradient."""
    logprobs, old, advantages, mask = four_ratios()
    loss, metrics = policy_loss(logprobs, old, advantages, mask, loss_mode="cispo")
    weights = torch.tensor([[1.2, 0.8, 0.8, 1.2]]).double()
    assert_close(loss, -(weights * advantages * logprobs).sum() / 4)
    loss.backward()
    assert_close(logprobs.grad, -weights * advantages / 4)
    assert float(metrics["pg_clipfrac"]) == 1


@pytest.mark.parametrize("mode", ["gspo", "cispo"])
def test_on_policy_gspo_and_cispo_have_the_policy_gradient(mode):
    """Tokens off the mask, even NaN, have no part in it."""
    batch = with_gradients(make_batch(1))
    logprobs, advantages, mask = batch["logprobs"], batch["advantages"], batch["mask"]
    old = logprobs.detach().masked_fill(mask == 0, NAN)
    policy_loss(logprobs, old, advantages, mask, loss_mode=mode)[0].backward()
    assert_close(logprobs.grad, -advantages * mask / mask.sum())


def test_the_upper_clip_can_be_wider_than_the_lower():
    ratios, advantages = torch.tensor([[1.5], [0.5]]), torch.tensor([[1.0], [-1.0]])
    costs = [
        policy_loss(ratio.log(), torch.zeros(1), advantage, torch.ones(1), clip_low=0.1, clip_high=0.4)[0]
        for ratio, advantage in zip(ratios, advantages, strict=True)
    ]
    assert_close(torch.stack(costs), torch.tensor([-1.4, 0.9]))


def test_on_policy_the_gradient_is_the_policy_gradient():
    batch = with_gradients(make_batch(1))
    logprobs, advantages, mask = batch["logprobs"], batch["advantages"], batch["mask"]
    policy_loss(logprobs, logprobs.detach(), advantages, mask)[0].backward()
    assert_close(logprobs.grad, -advantages * mask / mask.sum())


def test_importance_weights_multiply_the_loss():
    logprobs, old, advantages, mask = four_ratios()
    loss, _ = policy_loss(logprobs, old, advantages, mask, weights=torch.tensor([[2.0, 1.0, 1.0, 0.5]]))
    assert loss.item() == pytest.approx((-2.4 - 0.5 + 0.8 + 1.5) / 4)


def test_value_loss_by_hand():
    values = torch.tensor([[1.0, 3.0, 1.0]], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([[1.2, 1.0, 2.0]]).double(), torch.tensor([[2.0, 4.0, 1.0]]).double()
    loss, metrics = value_loss(values, old, returns, torch.ones(1, 3), clip=0.5)
    assert loss.item() == pytest.approx(0.5 * (1.0 + 2.5**2 + 0.5**2) / 3)
    assert float(metrics["vf_clipfrac"]) == pytest.approx(2 / 3)
    assert float(metrics["vpred_mean"]) == pytest.approx(5 / 3)
    loss.backward()
    assert_close(values.grad, torch.tensor([[-1.0 / 3, 0.0, 0.0]], dtype=torch.float64))


def test_value_loss_without_a_clip_is_half_the_squared_error():
    batch = make_batch(2)
    loss, metrics = value_loss(
        batch["values"], batch["old_values"], batch["returns"], batch["mask"], clip=None
    )
    errors = (batch["values"] - batch["returns"])[batch["mask"].bool()]
    assert_close(loss, 0.5 * errors.square().mean())
    assert float(metrics["vf_clipfrac"]) == 0


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        ("token-mean", (1 + 2 + 6) / 3),
        ("seq-mean-token-mean", (1.5 + 6) / 2),
        ("seq-mean-token-sum", (3 + 6) / 2),
        ("constant", (3 + 6) / (2 * 10)),
    ],
)
def test_aggregates_by_hand(normalise, expected):
    per_token = torch.tensor([[1.0, NAN, 2.0], [NAN, NAN, 6.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[1, 0, 1], [0, 0, 1], [0, 0, 0]])
    count = count_for(mask, normalise, horizon=10)
    assert float(aggregate(per_token, mask, normalise=normalise, denominator=count)) == pytest.approx(
        expected
    )


def test_a_batch_in_which_nothing_counts_costs_nothing():
    mask = torch.zeros(2, 3)
    for normalise in MODES:
        assert count_for(mask, normalise) >= 1
        assert aggregate(torch.full((2, 3), NAN), mask, normalise=normalise) == 0


@every_mode
@given(seed=seeds, cut=st.integers(1, 4))
@fast
def test_micro_batches_add_up_to_the_mini_batch(normalise, seed, cut):
    batch = make_batch(seed)
    counts = {"denominator": count_for(batch["mask"], normalise), "tokens": count_for(batch["mask"])}
    whole, split = with_gradients(batch), with_gradients(batch)
    loss, metrics = both_losses(whole, normalise=normalise)
    loss.backward()
    parts = [
        both_losses({name: value[rows] for name, value in split.items()}, normalise=normalise, **counts)
        for rows in (slice(None, cut), slice(cut, None))
    ]
    sum(part for part, _ in parts).backward()
    assert_close(sum(part for part, _ in parts), loss)
    for name in ("logprobs", "values"):
        assert_close(split[name].grad, whole[name].grad)
    for name, value in metrics.items():
        assert_close(sum(part[name] for _, part in parts), value)


@every_mode
@given(seed=seeds, spoiled=st.sets(st.sampled_from(NUMBERS), min_size=1))
@fast
def test_what_stands_off_the_mask_is_never_read_and_gets_no_gradient(normalise, seed, spoiled):
    clean = make_batch(seed)
    off = clean["mask"] == 0
    dirty = clean | {name: clean[name].masked_fill(off, NAN) for name in spoiled}
    clean, dirty = with_gradients(clean), with_gradients(dirty)
    (loss, metrics), (same, same_metrics) = (
        both_losses(each, normalise=normalise) for each in (clean, dirty)
    )
    assert_close(same, loss)
    assert_close(same_metrics, metrics)
    same.backward()
    for name in ("logprobs", "values"):
        assert (dirty[name].grad[off] == 0).all()
        assert torch.isfinite(dirty[name].grad).all()


@every_mode
@given(seed=seeds, order=st.permutations(range(5)), padding=st.integers(1, 4))
@fast
def test_padding_and_the_order_of_rows_change_no_loss(normalise, seed, order, padding):
    batch = make_batch(seed)
    moved = {name: torch.nn.functional.pad(value[order], (0, padding)) for name, value in batch.items()}
    counts = {"denominator": count_for(batch["mask"], normalise, horizon=20)}
    assert_close(
        both_losses(moved, normalise=normalise, **counts), both_losses(batch, normalise=normalise, **counts)
    )


@pytest.mark.parametrize(
    ("normalise", "expected"),
    [
        ("token-mean", (1 + 2 + 4 + 8) / 3),
        ("seq-mean-token-mean", ((1 + 2) / 1 + (4 + 8) / 2) / 2),
        ("seq-mean-token-sum", (1 + 2 + 4 + 8) / 2),
        ("constant", (1 + 2 + 4 + 8) / (2 * 2)),
    ],
)
def test_training_on_more_than_the_policy_wrote_keeps_the_policys_scale(normalise, expected):
    costs = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    mask, everything = torch.tensor([[0, 1], [1, 1]]), torch.ones(2, 2)
    logprobs = torch.zeros(2, 2)
    loss, _ = policy_loss(logprobs, logprobs, -costs, mask, normalise=normalise, loss_mask=everything)
    assert loss.item() == pytest.approx(expected)


def test_the_metrics_stay_those_of_the_policys_tokens_when_the_loss_is_wider():
    batch = make_batch(4)
    arguments = [batch[name] for name in ("logprobs", "old_logprobs", "advantages", "mask")]
    wide = policy_loss(*arguments, loss_mask=torch.ones_like(batch["mask"]))
    narrow = policy_loss(*arguments)
    assert_close(wide[1], narrow[1])
    assert not torch.isclose(wide[0], narrow[0])


def test_a_wider_mask_divides_each_row_by_its_policy_tokens():
    per_token, mask = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0, 1, 1]])
    wide = aggregate(
        per_token,
        torch.ones(1, 3),
        normalise="seq-mean-token-mean",
        denominator=count_for(mask, "seq-mean-token-mean"),
        lengths=mask.sum(-1),
    )
    assert float(wide) == (1 + 2 + 3) / 2


def test_a_log_ratio_is_bounded_before_it_is_exponentiated():
    old = torch.tensor([[-200.0]])
    loss, _ = policy_loss(torch.zeros(1, 1), old, -torch.ones(1, 1), torch.ones(1, 1), clip_c=None)
    assert loss.item() == pytest.approx(math.exp(20))


def test_sft_loss_by_hand():
    weights = torch.tensor([[1, 1, 0.5, 0]])
    logprobs = torch.tensor([[-1.0, -3.0, -2.0, NAN]], requires_grad=True)
    loss, metrics = sft_loss(logprobs, weights)
    assert loss.item() == float(metrics["nll"]) == pytest.approx((1 + 3 + 1) / 2.5)
    loss.backward()
    assert_close(logprobs.grad, -weights / 2.5)


def test_sft_loss_on_what_was_written_is_torchs_cross_entropy():
    logits, targets = torch.randn(2, 6, 11), torch.randint(0, 11, (2, 6))
    wrote = torch.tensor([[0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 1, 0]])
    logprobs = logits.log_softmax(-1).gather(2, targets[:, :, None]).squeeze(2)
    labels = targets.masked_fill(wrote == 0, -100)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    assert_close(sft_loss(logprobs, wrote)[0], expected)


@given(seed=seeds, cut=st.integers(1, 4))
@fast
def test_micro_batches_of_sft_add_up_to_the_mini_batch(seed, cut):
    batch = make_batch(seed)
    logprobs, weights = batch["logprobs"], 0.3 + 0.7 * batch["mask"]
    total = float(weights.sum())
    parts = [
        sft_loss(logprobs[rows], weights[rows], denominator=total)[0] for rows in (range(cut), range(cut, 5))
    ]
    assert_close(sum(parts), sft_loss(logprobs, weights)[0])
