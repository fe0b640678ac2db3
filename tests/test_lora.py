"""Adapters merged into the weights: saved, digested, handed on and sampled as PEFT's own forward computes."""

from pathlib import Path

import peft
import pytest
import torch
from tests.tiny_models import byte_level_tokenizer, louder, tiny_model
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from srl.errors import UserError
from srl.models.check import check_merging
from srl.models.load import load_model
from srl.models.weights import add_lora, merged_weights, model_digest, plain_config, save_model, without_lora
from srl.rollout.rollout_weights import MergedLora
from srl.update.critic import Critic

IDS = torch.tensor([[5, 9, 200, 31, 7, 3, 3, 310], [8, 1, 44, 6, 399, 120, 77, 12]])
LAYERS = ["q_proj", "down_proj"]


def tied() -> PreTrainedModel:
    return tiny_model("llama")


def untied() -> PreTrainedModel:
    model = tiny_model()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    return model


def experts() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
        eos_token_id=0, pad_token_id=1, bos_token_id=None,
    )  # fmt: skip
    return louder(Qwen3MoeForCausalLM(config))


def conv1d() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=400, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=None
    )
    return louder(GPT2LMHeadModel(config))


CASES = [
    *((kind, modules) for kind in (tied, untied, experts, conv1d) for modules in ("all-linear", ["lm_head"])),
    *((kind, modules) for kind in (tied, untied, experts)
      for modules in (["embed_tokens"], ["lm_head", "embed_tokens"], [*LAYERS, "lm_head", "embed_tokens"])),
    *((kind, LAYERS) for kind in (tied, untied)),
    (conv1d, ["wte"]), (conv1d, ["lm_head", "wte"]), (conv1d, ["c_attn", "c_proj", "wte", "lm_head"]),
]  # fmt: skip


def name_of(value) -> str:
    return "+".join(value) if isinstance(value, list) else getattr(value, "__name__", value)


each_case = pytest.mark.parametrize(("kind", "modules"), CASES, ids=name_of)


def adapted(kind, modules) -> PreTrainedModel:
    """A model with an adapter that does something."""
    model = kind()
    add_lora(model, 4, 8, modules)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((found - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


@each_case
def test_saved_model_is_the_adapted_one(kind, modules, tmp_path: Path):
    model = adapted(kind, modules)
    expected = logits(model)
    assert float((expected - logits(kind())).abs().max()) > 1e-2 * float(expected.abs().max())
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    assert_same(logits(load_model(tmp_path / "merged")), expected)
    assert torch.equal(logits(model), expected)


@each_case
def test_adapter_beside_the_saved_model_is_peft_s_on_the_base(kind, modules, tmp_path: Path, recwarn):
    model, base = adapted(kind, modules), kind()
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    base.load_adapter(str(tmp_path / "merged" / "adapter"))
    assert_same(logits(base), logits(model))
    sizes = [weight.nbytes for weight in model.parameters() if weight.requires_grad]
    file = tmp_path / "merged" / "adapter" / "adapter_model.safetensors"
    assert sum(sizes) <= file.stat().st_size <= sum(sizes) + 20_000


@each_case
def test_weights_handed_on_make_a_plain_model_the_adapted_one(kind, modules):
    model = adapted(kind, modules)
    plain = type(model)(plain_config(model)).eval()
    weights = dict(merged_weights(model))
    missing = plain.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    names = {id(weight): name for name, weight in plain.named_parameters()}
    assert set(names.values()) <= weights.keys(), "each weight, tied ones once"
    assert_same(logits(plain), logits(model))


@each_case
def test_digest_is_that_of_the_saved_model(kind, modules, tmp_path: Path):
    model = adapted(kind, modules)
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    loaded = load_model(tmp_path / "merged")
    assert model_digest(model) == model_digest(loaded) != model_digest(kind())


@each_case
def test_reference_is_the_base(kind, modules):
    model = adapted(kind, modules)
    expected = logits(model)
    with without_lora(model):
        assert torch.equal(logits(model), logits(kind()))
    assert torch.equal(logits(model), expected)


@each_case
def test_merged_for_a_rollout_and_taken_out_again(kind, modules):
    model = adapted(kind, modules)
    expected, before = logits(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    lora = MergedLora(model)
    lora.merge()
    assert_same(logits(model), expected)
    lora.restore()
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_case
def test_merging_that_is_right_passes_and_the_check_changes_nothing(kind, modules, dtype):
    model = adapted(kind, modules).to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    state = torch.get_rng_state()
    check_merging(model)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "modules", "layer"),
    [(tied, ["lm_head"], "Linear"), (tied, ["embed_tokens"], "Embedding"), (tied, LAYERS, "Linear"),
     (experts, "all-linear", "ParamWrapper")],
    ids=name_of,
)  # fmt: skip
def test_merging_that_is_wrong_is_refused_before_training(kind, modules, layer, dtype, tmp_path, monkeypatch):
    """Layers whose change is left out."""
    save_model(kind(), byte_level_tokenizer(), tmp_path / "base")
    options = {"dtype": dtype, "lora_rank": 4, "lora_target_modules": modules}
    load_model(tmp_path / "base", **options)
    whole = getattr(peft.tuners.lora.layer, layer)
    right = whole.get_delta_weight
    monkeypatch.setattr(whole, "get_delta_weight", lambda *of: right(*of) * 0)
    with pytest.raises(UserError) as refused:
        load_model(tmp_path / "base", **options)
    assert "\n" not in str(refused.value)


def test_adapter_under_which_the_model_does_not_run_is_refused():
    """The router of Llama 4 gives a pair, to which PEFT cannot add."""
    config = Llama4TextConfig(
        vocab_size=400, hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=4,
    )  # fmt: skip
    with pytest.raises(UserError) as refused:
        add_lora(Llama4ForCausalLM(config), 4)
    assert "\n" not in str(refused.value)


@each_case
def test_critic_shares_the_base(kind, modules):
    model = adapted(kind, modules)
    critic, base = (
        Critic(model, lora_rank=2, lora_target_modules=["c_attn" if kind is conv1d else "q_proj"]),
        kind(),
    )
    with torch.no_grad():
        states = critic.decoder(IDS).last_hidden_state
        assert torch.equal(states, base.get_decoder()(IDS).last_hidden_state)
