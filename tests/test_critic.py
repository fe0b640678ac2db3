"""The critic: the value before a token, read from a copy of the policy, and how it is taught."""

from dataclasses import replace

import pytest
import torch
from tests.rows import SPECS, experience, gradients, policy, trajectory

from srl.models.weights import add_lora
from srl.update.critic import Critic, accumulate_critic, batched_values, explained_variance, update_critic
from srl.update.optimiser import Optimiser


def critic(head=1.0):
    """A critic whose head is not zero."""
    made = Critic(policy())
    with torch.no_grad():
        torch.nn.init.normal_(made.head.weight, std=head, generator=torch.Generator().manual_seed(0))
    return made.eval()


def rows(specs=SPECS, **changes):
    return experience([trajectory(spec, seed=n) for n, spec in enumerate(specs)], **changes)


def test_v_t_is_the_value_before_token_t():
    """V_t does not change with token t or any after it, and does with the token before."""
    made, batch = critic(), rows(SPECS[:1]).batch
    values = batched_values(made, batch, max_tokens=1000)[0]
    assert values[0] == 0
    for t in range(1, 7):
        ids = batch.input_ids.clone()
        ids[0, t] = 39 - ids[0, t]
        changed = batched_values(made, replace(batch, input_ids=ids), max_tokens=1000)[0]
        torch.testing.assert_close(changed[: t + 1], values[: t + 1])
        if t < 6:
            assert changed[t + 1] != pytest.approx(float(values[t + 1]), abs=1e-4)


def adapted(seed=0):
    """A policy whose adapter is no longer the identity."""
    model = policy(seed)
    add_lora(model, 2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.1, generator=generator)
    return model


def trained(model):
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def with_head(made):
    torch.nn.init.normal_(made.head.weight, generator=torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize("make", [policy, adapted])
def test_a_critic_with_an_adapter_starts_from_the_trunk_and_trains_adapter_and_head_alone(make):
    made = Critic(make(), lora_rank=2)
    assert made.head.weight.requires_grad
    assert all(".lora_" in name for name in trained(made) - {"head.weight"})
    assert len(trained(made)) == 1 + 2 * 7
    values, expected = (
        batched_values(with_head(item), rows().batch, max_tokens=1000) for item in (made, Critic(policy()))
    )
    torch.testing.assert_close(values, expected)


def test_neither_a_critic_with_an_adapter_nor_its_policy_changes_when_the_other_learns():
    model = adapted()
    made, batch = with_head(Critic(model, lora_rank=2)), rows().batch

    def learn(network):
        optimiser = Optimiser(network.parameters(), lr=0.1)
        for weight in optimiser.parameters:
            weight.grad = torch.ones_like(weight)
        optimiser.step()

    def logits():
        with torch.no_grad():
            return model(input_ids=batch.input_ids).logits

    before = logits()
    learn(made)
    assert torch.equal(logits(), before)
    values = batched_values(made, batch, max_tokens=1000)
    learn(model)
    assert not torch.equal(logits(), before)
    assert torch.equal(batched_values(made, batch, max_tokens=1000), values)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_of_micro_batches_add_up_to_that_of_the_whole(clip):
    made, part = critic(), rows()
    found = made(part.batch)
    error = (found - part.returns).square()
    if clip is not None:
        error = torch.maximum(
            error, (found.clamp(part.values - clip, part.values + clip) - part.returns).square()
        )
    loss = 0.5 * (error * part.mask).sum() / part.mask.sum()
    loss.backward()
    expected = gradients(made)
    for budget in (1, 16, 1000):
        metrics = accumulate_critic(made, part, clip=clip, normalise="token-mean", max_tokens=budget)
        assert metrics["critic/vf_loss"] == pytest.approx(loss.item(), rel=1e-5)
        for name, gradient in gradients(made).items():
            torch.testing.assert_close(gradient, expected[name], msg=name, rtol=1e-4, atol=1e-6)


def test_what_was_read_and_rows_that_are_out_teach_the_critic_nothing():
    made, part = critic(), rows()
    accumulate_critic(made, part, clip=0.5, normalise="token-mean", max_tokens=1000)
    expected = gradients(made)
    wild = replace(
        part,
        returns=part.returns.masked_fill(part.mask == 0, 9.0),
        values=part.values.masked_fill(part.mask == 0, -9.0),
    )
    accumulate_critic(made, wild, clip=0.5, normalise="token-mean", max_tokens=1000)
    for name, gradient in gradients(made).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)
    failed = experience([trajectory(spec, seed=n, failed=True) for n, spec in enumerate(SPECS)])
    optimiser = Optimiser(made.parameters(), lr=0.1)
    assert update_critic(made, optimiser, failed, clip=None, mini_batch_rows=4) == {
        "critic/skipped_steps": 0.0
    }


@pytest.mark.parametrize("rank", [0, 4])
def test_a_critic_learns_its_returns(rank):
    torch.manual_seed(0)
    made = Critic(adapted() if rank else policy(), lora_rank=rank)
    part = rows()
    returns = part.mask * torch.tensor([1.0, 0.0, -1.0, 0.5])[:, None]
    part = replace(part, returns=returns, values=torch.zeros_like(returns))
    optimiser = Optimiser(made.parameters(), lr=1e-2)
    before = explained_variance(part.values, returns, part.mask)
    metrics = update_critic(made, optimiser, part, clip=None, mini_batch_rows=4, epochs=100 if rank else 40)
    after = explained_variance(batched_values(made, part.batch, max_tokens=100), returns, part.mask)
    assert before == pytest.approx(0.0, abs=1e-6)
    assert after > 0.9
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/lr"] == pytest.approx(1e-2)


def test_explained_variance_by_hand():
    mask = torch.tensor([[1.0, 1, 1, 0]])
    returns = torch.tensor([[1.0, 2, 3, 100]])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full_like(returns, 7.0), returns, mask) == pytest.approx(0.0)
    # errors 1, 0, 2 around a mean of 1: variance 1; the returns' variance is 1
    assert explained_variance(torch.tensor([[0.0, 2, 1, 0]]), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([[1.0, 2, 2, 0]]), returns, mask) == pytest.approx(1 - (1 / 3))
    assert explained_variance(returns, torch.ones_like(returns), mask) == 0.0
    assert explained_variance(returns, returns, torch.zeros_like(mask)) == 0.0
