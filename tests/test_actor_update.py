"""The policy's update: one loss, whatever the micro-batches, and only on what the policy wrote."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from tests.rows import SPECS, experience, gradients, trajectory
from tests.rows import policy as small_policy
from tests.training import config, write_setting
from torch import nn

from srl.config import sections
from srl.train.rl import Learner, update_networks
from srl.update import losses
from srl.update.actor import ActorLoss, accumulate_actor, actor_loss, update_actor
from srl.update.logprobs import TokenStats, batched_stats
from srl.update.losses import count_for
from srl.update.optimiser import Optimiser

FULL = ActorLoss(temperature=0.8, entropy_coeff=0.1, kl_loss_coef=0.2)
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant")


def policy(dtype=torch.float64):
    return small_policy().to(dtype)


def rows(specs=SPECS, **changes):
    trajectories = [
        trajectory(spec, seed=n, question=f"q{n // 2}", sample=n % 2) for n, spec in enumerate(specs)
    ]
    return experience(trajectories, dtype=torch.float64, **changes)


def whole_loss(model, part, loss):
    """The loss of a mini-batch in one piece."""
    denominator = count_for(part.mask, loss.normalise, loss.horizon)
    return actor_loss(model, part, loss, denominator, float(part.mask.sum()))[:2]


def same(found, expected):
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("normalise", MODES)
def test_gradients_of_micro_batches_add_up_to_that_of_the_whole(normalise):
    model, part, loss = policy(), rows(), replace(FULL, normalise=normalise, horizon=16)
    value, metrics = whole_loss(model, part, loss)
    terms = {name.removeprefix("actor/"): number.item() for name, number in metrics.items()}
    total = terms["pg_loss"] + 0.2 * terms["kl_loss"] - 0.1 * terms["entropy_loss"]
    assert value.item() == pytest.approx(total)
    value.backward()
    expected = gradients(model)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-6
    for budget in (1, 16, 26, 1000):
        totals = accumulate_actor(model, part, loss=loss, max_tokens=budget)
        same(gradients(model), expected)
        assert totals == pytest.approx({name: number.item() for name, number in metrics.items()})


@pytest.mark.parametrize("normalise", MODES)
def test_rows_whose_search_failed_leave_gradients_unchanged(normalise):
    """Also when they fill a micro-batch of their own."""
    model, loss = policy(), replace(FULL, normalise=normalise, horizon=16)
    good = [trajectory(spec, seed=n) for n, spec in enumerate(SPECS)]
    bad = [trajectory("pp" + "a" * 30, failed=True), trajectory("paoa", failed=True, seed=1)]
    part = experience(good, dtype=torch.float64)
    accumulate_actor(model, part, loss=loss, max_tokens=1000)
    expected = gradients(model)
    wider = experience([*good, *bad], dtype=torch.float64)
    known = {name: getattr(part, name) for name in ("advantages", "returns", "old_logprobs", "ref_logprobs")}
    wider = replace(wider, **{
        name: nn.functional.pad(tensor, (0, wider.mask.shape[1] - tensor.shape[1], 0, 2), value=5.0)
        for name, tensor in known.items()
    })  # fmt: skip
    for budget in (1, 1000):
        totals = accumulate_actor(model, wider, loss=loss, max_tokens=budget)
        same(gradients(model), expected)
        assert all(math.isfinite(number) for number in totals.values())


def test_a_mini_batch_of_lost_rows_takes_no_step():
    model = policy()
    before = [weight.clone() for weight in model.parameters()]
    part = rows(("paa", "paoa"))
    part = replace(part, mask=torch.zeros_like(part.mask), loss_mask=torch.zeros_like(part.mask))
    optimiser = Optimiser(model.parameters(), lr=0.1)
    assert update_actor(model, optimiser, part, loss=FULL, mini_batch_rows=2) == {"actor/skipped_steps": 0.0}
    assert all(torch.equal(weight, kept) for weight, kept in zip(model.parameters(), before, strict=True))


def taught(model, part):
    """The gradients of a mini-batch."""
    accumulate_actor(model, part, loss=FULL, max_tokens=1000)
    return gradients(model)


def test_observations_are_context_and_never_targets():
    """What an observation's log-prob is does not matter; what it says to the policy's next token does."""
    model = policy()
    part = rows(("ppaaooaa",))
    expected = taught(model, part)
    read = part.batch.response_mask == 0
    for name in ("old_logprobs", "ref_logprobs", "advantages"):
        part = replace(part, **{name: getattr(part, name).masked_fill(read, 7.0)})
    same(taught(model, part), expected)
    token = part.batch.input_ids.clone()
    token[0, 5] = 39 - int(token[0, 5])
    changed = replace(part, tokens=replace(part.batch, input_ids=token))
    assert any(not torch.allclose(found, expected[name]) for name, found in taught(model, changed).items())


def learner(config, model):
    return Learner(config, None, model, None, None, None)


class Counting(Optimiser):
    """An optimiser that counts its steps."""

    steps = 0

    def step(self):
        self.steps += 1
        return super().step()


def test_the_mini_batch_size_counts_prompts_times_n(tmp_path, workspace):
    """8 questions × 2 samples in mini-batches of 4 questions: two steps of 8 rows, in each epoch."""
    write_setting(tmp_path)
    chosen = config(
        tmp_path, "grpo", data__train_batch_size=8, actor__ppo_mini_batch_size=4, actor__ppo_epochs=3
    )
    model = policy(dtype=torch.float32)
    part = experience([trajectory(SPECS[n % 4], seed=n) for n in range(16)])
    optimiser = Counting(model.parameters(), lr=1e-4)

    update_networks(learner(chosen, model), {"actor": optimiser}, 1, part)
    assert optimiser.steps == 2 * 3


PLAIN = ActorLoss(temperature=0.8)


def agreeing(part, *groups):
    """Groups of two rows whose scores agree: advantage 0 on all of their tokens."""
    rows = [row for group in groups for row in (2 * group, 2 * group + 1)]
    return replace(part, advantages=part.advantages.index_fill(0, torch.tensor(rows), 0.0))


def read_rows(model, part, loss):
    """The rows that go through the update."""
    seen = TokenStats(torch.zeros_like(part.mask), torch.zeros_like(part.mask))
    accumulate_actor(model, part, loss=loss, max_tokens=16, stats=seen)
    model.zero_grad(set_to_none=True)
    return seen.logprobs.bool().any(1).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("observations", [True, False])
@pytest.mark.parametrize("normalise", MODES)
def test_groups_that_agree_go_through_no_pass_and_the_gradient_is_that_of_all_rows(normalise, observations):
    """Their tokens and rows still count in what the loss is divided by."""
    model, loss = policy(), replace(PLAIN, normalise=normalise, horizon=16)
    part = agreeing(rows(SPECS[2:] + SPECS, mask_observations=observations), 0)
    value, metrics = whole_loss(model, part, loss)
    value.backward()
    expected = gradients(model)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-6
    for budget in (1, 26, 1000):
        totals = accumulate_actor(model, part, loss=loss, max_tokens=budget)
        same(gradients(model), expected)
        assert totals["actor/pg_loss"] == pytest.approx(metrics["actor/pg_loss"].item())
    assert read_rows(model, part, loss) == [2, 3, 4, 5]


@pytest.mark.parametrize("term", [{"entropy_coeff": 0.1}, {"kl_loss_coef": 0.2}])
def test_with_entropy_or_kl_in_the_loss_groups_that_agree_stay_in(term):
    model, part = policy(), agreeing(rows(), 0)
    assert read_rows(model, part, replace(PLAIN, **term)) == [0, 1, 2, 3]
    without = replace(part, ref_logprobs=None)
    assert read_rows(model, without, replace(PLAIN, kl_loss_coef=0.2)) == [2, 3]


def test_without_a_pass_for_old_log_probs_entropy_is_that_of_the_rows_read(tmp_path):
    write_setting(tmp_path)
    chosen = config(
        tmp_path, "grpo", data__train_batch_size=2, actor__ppo_mini_batch_size=2, actor__use_kl_loss=False
    )
    model = policy(dtype=torch.float32)
    part = experience([trajectory(spec, seed=n) for n, spec in enumerate(SPECS)])
    part = replace(agreeing(part, 0), old_logprobs=None, ref_logprobs=None)
    read = part.rows(torch.tensor([2, 3]))
    expected = batched_stats(model, read.batch, read.mask, max_tokens=1000).entropy[read.mask.bool()].mean()

    optimiser = Optimiser(model.parameters(), lr=1e-4)
    after, metrics = update_networks(learner(chosen, model), {"actor": optimiser}, 1, part)
    assert after.old_logprobs.any(dim=1).tolist() == [False, False, True, True]
    assert metrics["actor/entropy"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["actor/no_gradient_share"] == 0.5


def test_the_configuration_names_every_loss_and_every_way_to_divide_it():
    """It may not import them: it comes before every stage."""
    assert get_args(sections.LossMode) == get_args(losses.LossMode)
    assert get_args(sections.Actor.model_fields["loss_agg_mode"].annotation) == get_args(losses.LossAggMode)
