"""Log-probs and entropies of the tokens that matter are those of the whole model, for any model."""

import math
from dataclasses import replace

import pytest
import torch
from tests.live_tensors import Live
from tests.rows import gradients, trajectory
from tests.tiny_models import louder, new_model

from srl.update import logits
from srl.update import logprobs as logprobs_module
from srl.update.batch import collate
from srl.update.logprobs import batched_stats, token_stats

VOCABULARY = 40
SPECS = ("ppaaoaa", "paaa", "ppppafffa")
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def plain(kind="qwen2", dtype=torch.float32):
    """A small model whose logits are some units apart."""
    model = new_model(kind, vocab_size=VOCABULARY, layers=2, width=16, heads=2, ffn=24, max_length=64)
    return louder(model).to(dtype)


def of_library(name, **changes):
    """A small model of a kind whose logits are more than head times state."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
    return louder(transformers.AutoModelForCausalLM.from_config(config))


ODD = {
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "Gemma2": {"final_logit_softcapping": 4.0, "head_dim": 8},
}


def batch_of(specs=SPECS):
    return collate([trajectory(spec, vocabulary=VOCABULARY) for spec in specs])


def whole(model, batch, mask, temperature):
    """Log-probs and entropies from all of the model's own logits, with torch.distributions."""
    out = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    known = torch.distributions.Categorical(logits=out[:, :-1] / temperature)
    logprobs = torch.zeros(mask.shape, dtype=out.dtype)
    entropy = torch.zeros(mask.shape, dtype=out.dtype)
    logprobs[:, 1:], entropy[:, 1:] = known.log_prob(batch.input_ids[:, 1:]), known.entropy()
    return logprobs * mask, entropy * mask


@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_stats_are_those_of_the_models_own_logits(kind, temperature):
    model, batch = plain(kind), batch_of()
    stats = token_stats(model, batch, batch.response_mask, temperature)
    logprobs, entropy = whole(model, batch, batch.response_mask, temperature)
    torch.testing.assert_close(stats.logprobs, logprobs)
    torch.testing.assert_close(stats.entropy, entropy)
    assert stats.entropy.max() > 0.5


@pytest.mark.parametrize("name", ODD)
def test_models_that_scale_or_cap_their_logits_are_asked_themselves(name):
    model, batch = of_library(name, **ODD[name]), batch_of()
    assert logits.logits_of(model) is logits.whole_model
    stats = token_stats(model, batch, batch.response_mask, 0.7)
    logprobs, entropy = whole(model, batch, batch.response_mask, 0.7)
    torch.testing.assert_close(stats.logprobs, logprobs)
    torch.testing.assert_close(stats.entropy, entropy)
    bare = model.get_output_embeddings()(logits.last_hidden_state(model, batch))
    assert not torch.allclose(bare, model(batch.input_ids).logits, atol=0.1), "or this test would not be one"


def test_a_cap_is_noticed_while_no_logit_reaches_it():
    model = of_library("Gemma2", **ODD["Gemma2"])
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-4)
    assert not logits.is_head_on_trunk(model)


@pytest.mark.parametrize("name", ["Cohere", "Granite", "Gemma2"])
def test_the_same_models_without_scale_or_cap_go_the_short_way(name):
    off = {"Cohere": {"logit_scale": 1.0}, "Granite": {"logits_scaling": 1.0},
           "Gemma2": {"final_logit_softcapping": None, "head_dim": 8}}  # fmt: skip
    assert logits.is_head_on_trunk(of_library(name, **off[name]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_usual_models_go_the_short_way_in_every_dtype(dtype):
    assert logits.is_head_on_trunk(plain("qwen2", dtype))
    assert logits.is_head_on_trunk(plain("llama", dtype))


def test_looking_at_a_model_leaves_it_as_it_was():
    model = plain()
    assert logits.is_head_on_trunk(model)
    assert not model.get_output_embeddings()._forward_hooks
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("odd", [False, True])
def test_gradients_are_those_of_the_whole_model(odd):
    model = of_library("Gemma2", **ODD["Gemma2"]) if odd else plain()
    batch = batch_of()
    stats = token_stats(model, batch, batch.response_mask, 0.7)
    (stats.logprobs.sum() + stats.entropy.sum()).backward()
    ours = gradients(model)
    logprobs, entropy = whole(model, batch, batch.response_mask, 0.7)
    (logprobs.sum() + entropy.sum()).backward()
    for name, expected in gradients(model).items():
        torch.testing.assert_close(ours[name], expected, msg=name, rtol=1e-4, atol=1e-4)


def test_right_padding_changes_nothing():
    model = plain()
    alone = token_stats(model, batch_of(SPECS[1:2]), batch_of(SPECS[1:2]).response_mask)
    batch = batch_of()
    stats = token_stats(model, batch, batch.response_mask)
    torch.testing.assert_close(stats.logprobs[1, :4], alone.logprobs[0])
    torch.testing.assert_close(stats.entropy[1, :4], alone.entropy[0])
    other = collate([trajectory(spec, vocabulary=VOCABULARY) for spec in SPECS], pad_id=7)
    torch.testing.assert_close(token_stats(model, other, other.response_mask).logprobs, stats.logprobs)


@pytest.mark.parametrize("chunk", [1, 2, 3, 100])
def test_the_size_of_a_chunk_changes_nothing(monkeypatch, chunk):
    model, batch = plain(), batch_of()
    expected = token_stats(model, batch, batch.response_mask)
    monkeypatch.setattr(logprobs_module, "CHUNK", chunk)
    stats = token_stats(model, batch, batch.response_mask)
    torch.testing.assert_close(stats.logprobs, expected.logprobs)
    torch.testing.assert_close(stats.entropy, expected.entropy)


@pytest.mark.parametrize("odd", [False, True])
def test_recomputing_logits_gives_the_same_gradients(monkeypatch, odd):
    model = of_library("Gemma2", **ODD["Gemma2"]) if odd else plain()
    batch, heads = batch_of(), []
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: heads.append(1))

    def run():
        heads.clear()
        stats = token_stats(model, batch, batch.response_mask, 0.7)
        (stats.logprobs * torch.arange(9) + stats.entropy).sum().backward()
        return gradients(model), len(heads)

    logits.logits_of(model)
    monkeypatch.setattr(logprobs_module, "CHUNK", 4)
    kept, calls = run()
    monkeypatch.setattr(logprobs_module, "KEPT_LOGITS", 0)
    again, more_calls = run()
    hook.remove()
    for name, expected in kept.items():
        torch.testing.assert_close(again[name], expected, msg=name)
    assert (calls, more_calls) == ((1, 1) if odd else (3, 6)), "the head runs once more in the backward pass"


def test_stats_are_zero_where_nothing_was_asked():
    model, batch = plain(), batch_of()
    stats = token_stats(model, batch, batch.response_mask)
    assert torch.equal(stats.logprobs != 0, batch.response_mask.bool())
    none = token_stats(model, batch, torch.zeros_like(batch.response_mask))
    assert not none.logprobs.any()
    assert none.entropy.shape == batch.input_ids.shape
    first = token_stats(model, batch, torch.ones_like(batch.response_mask))
    assert not first.logprobs[:, 0].any(), "nothing predicts the first token of a row"


@pytest.mark.parametrize("budget", [1, 14, 1000])
def test_micro_batches_change_nothing(budget):
    model, batch = plain(), batch_of()
    expected = token_stats(model, batch, batch.response_mask, 0.7)
    stats = batched_stats(model, batch, batch.response_mask, max_tokens=budget, temperature=0.7)
    torch.testing.assert_close(stats.logprobs, expected.logprobs.detach())
    torch.testing.assert_close(stats.entropy, expected.entropy.detach())
    assert not stats.logprobs.requires_grad


def test_bfloat16_is_normalised_in_float32():
    model, batch = plain("qwen2", torch.bfloat16), batch_of()
    stats = token_stats(model, batch, batch.response_mask)
    wanted = batch.response_mask[:, 1:] != 0
    states, head = logits.logits_of(model)(model, batch, wanted)
    raw = head(states)
    assert raw.dtype == torch.bfloat16
    ids = batch.input_ids[:, 1:][wanted]
    expected = raw.float().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(stats.logprobs[:, 1:][wanted], expected)
    plain_logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    plainly = plain_logits.float().log_softmax(-1)[:, :-1][wanted].gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(expected, plainly, rtol=0, atol=0.03)


def test_stats_come_through_a_lora_adapter():
    from srl.models.weights import add_lora, without_lora

    model, batch = plain(), batch_of()
    before = token_stats(model, batch, batch.response_mask).logprobs.detach()
    add_lora(model, 4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    after = token_stats(model, batch, batch.response_mask).logprobs.detach()
    torch.testing.assert_close(after, whole(model, batch, batch.response_mask, 1.0)[0].detach())
    assert not torch.allclose(after, before, atol=0.1)
    with without_lora(model):
        torch.testing.assert_close(token_stats(model, batch, batch.response_mask).logprobs.detach(), before)


def test_what_stands_after_a_row_is_not_read():
    """Ids, also impossible ones, in the padding of a row change nothing."""
    model, batch = plain(), batch_of()
    ids = batch.input_ids.clone()
    ids[batch.attention_mask == 0] = VOCABULARY - 1
    stats = token_stats(model, replace(batch, input_ids=ids), batch.response_mask)
    torch.testing.assert_close(stats.logprobs, token_stats(model, batch, batch.response_mask).logprobs)


def from_logits(rows, entropy, temperature=0.7, kept=2**21):
    """Ours and, as an oracle, autograd through `log_softmax`: values and the gradient of a mixed sum."""
    torch.manual_seed(0)
    start, targets = 3 * torch.randn(rows, 11, dtype=torch.float64), torch.randint(11, (rows,))
    weights = torch.randn(2, rows, dtype=torch.float64)
    found = []
    for ours in (True, False):
        given = start.clone().requires_grad_()
        if ours:
            chosen, spread = logprobs_module._FromLogits.apply(given, targets, temperature, entropy)
        else:
            known = (given / temperature).log_softmax(-1)
            chosen, spread = known.gather(1, targets[:, None])[:, 0], -(known.exp() * known).sum(-1)
        total = (weights[0] * chosen).sum() + ((weights[1] * spread).sum() if entropy else 0)
        total.backward()
        found.append((chosen.detach(), spread.detach() if entropy else None, given.grad))
    return found


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("most", [1, 22, 2**21])
def test_values_and_gradients_from_logits_are_autograds_whatever_is_in_memory(monkeypatch, entropy, most):
    monkeypatch.setitem(logprobs_module.FLOAT32_LOGITS, "cpu", most)
    ours, autograd = from_logits(5, entropy)
    for mine, expected in zip(ours, autograd, strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    ("logits_", "expected"),
    [([4.2] * 8, math.log(8)), ([math.log(p) + 7 for p in (0.5, 0.25, 0.25)], 1.5 * math.log(2))],
    ids=["uniform", "a half and two quarters"],
)
def test_entropy_by_hand(logits_, expected):
    given = torch.tensor([logits_])
    entropy = logprobs_module._FromLogits.apply(given, torch.tensor([0]), 1.0, True)[1]
    assert float(entropy) == pytest.approx(expected)


def test_only_the_entropy_can_carry_a_gradient():
    logits_ = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([1, 0, 6])
    assert torch.autograd.gradcheck(
        lambda z: logprobs_module._FromLogits.apply(z, targets, 2.0, True)[1], logits_
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_at_a_vocabulary_of_152k_is_that_of_one_chunk(monkeypatch, dtype):
    """Forward and backward: a chunk's logits and their gradient in the model's dtype, little else."""
    vocabulary, width, chunk, rows = 151_936, 8, 32, 150
    monkeypatch.setattr(logprobs_module, "CHUNK", chunk)
    monkeypatch.setattr(logprobs_module, "KEPT_LOGITS", 0)
    monkeypatch.setitem(logprobs_module.FLOAT32_LOGITS, "cpu", vocabulary)
    head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
    states = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (rows,))
    of_chunk = chunk * vocabulary * dtype.itemsize
    with Live([head.weight, states, targets]) as live:
        pieces = [
            logprobs_module._head(head, states[at : at + chunk], targets[at : at + chunk], 0.9, True)
            for at in range(0, rows, chunk)
        ]
        torch.cat([chosen for chosen, _ in pieces]).sum().backward()
    of_head = head.weight.nbytes
    assert 2 * of_chunk < live.peak < 2.2 * of_chunk + 2 * of_head + 3 * 4 * vocabulary
