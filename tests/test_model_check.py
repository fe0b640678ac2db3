"""A model is checked before it trains or generates: what fails is refused, or the safe way is taken."""

import asyncio
from dataclasses import replace

import pytest
import torch
from tests import model_families as families
from tests.rows import experience, gradients, trajectory
from tests.tiny_models import byte_level_tokenizer, tiny_model

from srl.errors import UserError
from srl.models.load import check_saved, load_model
from srl.models.weights import add_lora, save_model
from srl.rollout.cached_forward import CachedForward, PlainForward
from srl.rollout.choose_forward import choose_forward
from srl.rollout.codec import Codec
from srl.rollout.engine import Sampling
from srl.rollout.torch_engine import TorchEngine
from srl.train.model_check import check_model
from srl.update.actor import ActorLoss, update_actor
from srl.update.logprobs import batched_stats
from srl.update.optimiser import Optimiser

LONGEST = 96


def first_layer(change):
    """A model whose first layer adds `change(module, states)` to its states."""
    model = tiny_model()
    model.set_attn_implementation("eager")  # without packing, so that rows share a pass
    model.model.layers[0].register_forward_hook(lambda module, given, states: states + change(module, states))
    return model


def noise(module, states):
    return 0.1 * torch.randn_like(states)


def said_of(model) -> list[str]:
    notes: list[str] = []
    check_model(model, LONGEST, notes.append)
    return notes


def in_place(module, states):
    """What RWKV does in its first pass: the weights are then not those of the file."""
    if not hasattr(module, "divided"):
        module.divided = True
        with torch.no_grad():
            module.mlp.down_proj.weight.div_(2)
    return 0 * states


WRONG = {
    "later tokens": lambda module, states: 0.1 * states.flip(1).cumsum(1).flip(1),
    "other rows": lambda module, states: 0.5 * (states.mean(0, keepdim=True) - states),
    "noise": noise,
    "raises": lambda module, states: states.missing,
    "no number": lambda module, states: states * float("nan"),
    "in place": in_place,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_what_cannot_be_right_is_refused_in_one_line(change):
    for check in (lambda model: choose_forward(model, 4, LONGEST), said_of):
        with pytest.raises(UserError):
            check(first_layer(change))


def too_long(module, states):
    """What a table of positions does that is shorter than the configuration says."""
    return states if states.shape[1] < 50 else states[:, torch.tensor(50)]


def test_a_model_that_raises_in_an_episode_or_an_update_is_one_line():
    model = first_layer(lambda module, states: 0 * states)
    engine = TorchEngine(
        model, Codec(byte_level_tokenizer()), max_num_seqs=2, max_model_len=LONGEST, deterministic=True
    )
    model.model.layers[0].register_forward_pre_hook(
        lambda module, given: (too_long(module, given[0]), *given[1:])
    )
    given = experience([trajectory("p" * 60 + "aa", vocabulary=400)])

    def sample():
        asyncio.run(engine.generate("0", list(range(60)), Sampling(max_tokens=4)))

    for run in (sample, lambda: batched_stats(model, given.batch, given.mask, max_tokens=100)):
        with pytest.raises(UserError) as caught:
            run()
        assert "Qwen2" in str(caught.value)


def test_a_model_that_gives_the_logits_of_its_router_is_as_any_other(tmp_path):
    model = families.build("mixtral")
    model.config.output_router_logits = True
    save_model(model, byte_level_tokenizer(), tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert isinstance(choose_forward(loaded, 4, LONGEST), CachedForward)
    assert said_of(loaded) == []
    save_model(loaded, byte_level_tokenizer(), tmp_path / "saved")
    check_saved(loaded, tmp_path / "saved")


def test_a_backward_pass_that_raises_is_refused():
    def in_place(module, states):
        return torch.nn.functional.relu(states).exp().relu_().mul_(0) if states.requires_grad else 0 * states

    model = first_layer(in_place)
    assert isinstance(choose_forward(model, 4, LONGEST), CachedForward), "a forward pass alone is right"
    with pytest.raises(UserError):
        said_of(model)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("qwen2", torch.float32), ("qwen2", torch.bfloat16), ("llama", torch.float16)]
)
def test_a_usual_model_passes_without_a_word(kind, dtype):
    model = tiny_model(kind, dtype=dtype, layers=6)
    assert said_of(model) == []
    add_lora(model, 4)
    assert said_of(model) == []
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_policy_trained_is_the_one_that_sampled_though_train_mode_adds_noise():
    """As in the router of Phi-3.5-MoE, which samples in train mode."""
    model = first_layer(lambda module, states: noise(module, states) if module.training else 0 * states)
    given = experience([trajectory("ppaaoaa", vocabulary=400), trajectory("paaa", vocabulary=400)])
    old = batched_stats(model, given.batch, given.mask, max_tokens=100).logprobs
    optimiser = Optimiser(model.parameters(), lr=1e-4)
    metrics = update_actor(
        model, optimiser, replace(given, old_logprobs=old), loss=ActorLoss(), mini_batch_rows=2
    )
    assert metrics["actor/pg_clipfrac"] == 0
    assert abs(metrics["actor/ppo_kl"]) < 1e-6


def test_recomputed_layers_have_no_dropout(tmp_path):
    torch.manual_seed(0)
    families.build("opt").save_pretrained(tmp_path / "model")
    found = []
    for recomputed in (False, True):
        model = load_model(tmp_path / "model", gradient_checkpointing=recomputed)
        assert model.config.dropout > 0
        model(torch.arange(2, 30)[None], use_cache=False).logits.logsumexp(-1).sum().backward()
        found.append(gradients(model))
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, msg=name)


def test_no_cache_where_an_episode_passes_a_step_of_the_attentions_temperature():
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 48}
    model = families.of_sizes("llama4_text", floor_scale=24, attn_scale=1.0, **layers, **experts)
    assert isinstance(choose_forward(model, 4, LONGEST), PlainForward)


@pytest.mark.parametrize(
    ("family", "rank", "outcome"),
    [
        ("opt", 4, "right"),
        ("gemma2", 0, "safe"),
        ("phimoe", 0, "right"),
        ("modernbert-decoder", 4, "safe"),
        ("llama4_text", 4, "refused"),
    ],
)
def test_families_sample_and_train_alike_or_are_refused(family, rank, outcome, tmp_path):
    save_model(families.build(family), byte_level_tokenizer(), tmp_path / "model")
    row = families.measure(tmp_path / "model", rank)
    assert row["outcome"] == outcome
    assert row.get("gap", 0) < 1e-3
    assert row.get("clipfrac", 0) == 0
