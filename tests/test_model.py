"""Models and tokenizers: what loads, what is refused and how, and what a saved directory holds."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from tests import model_families as families
from tests.live_tensors import Live
from tests.tiny_models import EOS, byte_level_tokenizer, tiny_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    MptConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from srl.config.sections import Model
from srl.errors import UserError
from srl.model import (
    add_lora,
    check_tags,
    context_of,
    count_parameters,
    has_lora,
    load_model,
    load_tokenizer,
    merged_weights,
    model_digest,
    new_model,
    on_device,
    pick_device,
    pick_dtype,
    save_model,
    without_lora,
)
from srl.protocol import STOP_STRINGS
from srl.train.load_components import load_policy

IDS = torch.tensor([[5, 9, 200, 31, 7]])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(tiny_model(), byte_level_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def with_trained_lora(path: Path) -> PreTrainedModel:
    """The saved model with an adapter that does something."""
    model = load_model(path, lora_rank=4, lora_alpha=8)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    return model


def test_saved_model_loads_as_it_was(saved):
    model = load_model(saved, device="cpu")
    assert model.dtype == torch.float32
    assert not model.training
    torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)


def test_dtype_and_attention_are_those_asked_for(saved):
    model = load_model(saved, dtype="bfloat16", attn_implementation="eager")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"


def test_a_model_without_sdpa_has_eager_attention_and_says_so(tmp_path):
    save_model(families.build("gpt_oss"), byte_level_tokenizer(), tmp_path / "model")
    section = Model(path=str(tmp_path / "model"), device="cpu")
    said: dict[str, list[str]] = {"auto": [], "eager": []}
    for typed, notes in said.items():
        policy = load_policy(section.model_copy(update={"attn_implementation": typed}), notes.append)
        assert policy.model.config._attn_implementation == "eager"
    assert len(said["auto"]) == len(said["eager"]) + 1


@pytest.mark.parametrize("typed", ["sdpa", "no-such"])
def test_a_typed_attention_that_a_model_lacks_is_refused_with_its_key(tmp_path, typed):
    save_model(families.build("gpt_oss"), byte_level_tokenizer(), tmp_path / "model")
    with pytest.raises(UserError, match=f"^model.attn_implementation={typed}") as refused:
        load_model(tmp_path / "model", attn_implementation=typed)
    assert "\n" not in str(refused.value)


def test_head_in_float32_is_exact_on_the_trunks_states_and_stays_the_models_own(saved, tmp_path):
    """Sampling and update see the same float32 logits; weights, gradients and files keep their precision."""
    plain = load_model(saved, dtype="bfloat16", device="cpu")
    model = load_model(saved, dtype="bfloat16", device="cpu", cast_lm_head_to_fp32=True)
    with torch.no_grad():
        states = model.get_decoder()(IDS).last_hidden_state
        exact = states.double() @ model.get_output_embeddings().weight.double().T
    assert logits(model).dtype == torch.float32
    torch.testing.assert_close(logits(model).double(), exact, rtol=1e-5, atol=1e-5)
    assert float((logits(plain).double() - exact).abs().max()) > 1e-3, "bfloat16 rounds its logits"
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    model(IDS).logits[0, 0, 0].backward()
    assert model.get_output_embeddings().weight.grad.dtype == torch.bfloat16
    save_model(model, byte_level_tokenizer(), tmp_path / "again")
    assert model_digest(tmp_path / "again") == model_digest(plain)


def test_head_with_an_adapter_is_not_cast(saved):
    with pytest.raises(UserError, match=r"cast_lm_head_to_fp32=true: the head of this model is a"):
        load_model(saved, lora_rank=2, lora_target_modules=["lm_head"], cast_lm_head_to_fp32=True)


class Passes:
    """Counts the forward passes of a module."""

    def __init__(self, module):
        self.count, self._module = 0, module

    def __enter__(self):
        self._hook = self._module.register_forward_hook(self._add)
        return self

    def __exit__(self, *error):
        self._hook.remove()

    def _add(self, *given):
        self.count += 1


def test_gradient_checkpointing_computes_the_same_gradients(saved):
    gradients = []
    for checkpointing in (False, True):
        model = load_model(saved, gradient_checkpointing=checkpointing)
        with Passes(model.model.layers[0].input_layernorm) as passes:
            model(IDS, use_cache=False).logits.sum().backward()
            assert passes.count == 1 + checkpointing
            with torch.no_grad():
                model(IDS)
            assert passes.count == 2 + checkpointing
        gradients.append(model.model.embed_tokens.weight.grad)
    torch.testing.assert_close(*gradients)


def test_saved_directory_tells_others_where_a_turn_ends(saved):
    assert GenerationConfig.from_pretrained(saved).stop_strings == ["</search>", "</answer>"]
    assert AutoModelForCausalLM.from_pretrained(saved).config.vocab_size == 400


def test_stop_strings_are_left_out_where_none_are_given(tmp_path):
    save_model(tiny_model(), byte_level_tokenizer(), tmp_path / "model", stop_strings=())
    assert GenerationConfig.from_pretrained(tmp_path / "model").stop_strings is None


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({"temperature": 0.9, "top_p": 0.6}, {"do_sample": True, "temperature": 0.9, "top_p": 0.6}),
        ({"num_beams": 2, "num_return_sequences": 3}, {"eos_token_id": 7}),
    ],
)
def test_a_generation_config_that_transformers_reads_and_does_not_write_is_saved(tmp_path, given, saved):
    """As of models that were published with a temperature and without do_sample."""
    model = tiny_model()
    model.generation_config.eos_token_id = 7
    for name, value in given.items():
        setattr(model.generation_config, name, value)
    with pytest.raises(ValueError, match="to save the configuration"):
        model.save_pretrained(tmp_path / "refused")
    save_model(model, byte_level_tokenizer(), tmp_path / "model")
    found = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert found.items() >= {**saved, "stop_strings": list(STOP_STRINGS)}.items()
    assert {name: getattr(model.generation_config, name) for name in given} == given


def test_saving_leaves_the_generation_config_of_the_model_alone(tmp_path):
    model = tiny_model()
    save_model(model, byte_level_tokenizer(), tmp_path / "model")
    assert model.generation_config.stop_strings is None


def test_existing_directory_is_not_replaced_by_a_model(saved):
    before = model_digest(saved)
    with pytest.raises(UserError, match="exists already"):
        save_model(tiny_model(seed=3), byte_level_tokenizer(), saved)
    assert model_digest(saved) == before


def test_failed_save_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.save_pretrained = fail
    with pytest.raises(KeyboardInterrupt):
        save_model(tiny_model(), tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_fresh_adapter_changes_nothing_and_is_all_that_trains(saved):
    model = load_model(saved, lora_rank=4)
    assert has_lora(model)
    torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert count_parameters(model, trainable=True) < count_parameters(model) / 2


def test_adapter_goes_on_the_modules_named(saved):
    model = load_model(saved, lora_rank=2, lora_target_modules=["q_proj", "v_proj"])
    modules = {name.split(".")[-4] for name, p in model.named_parameters() if p.requires_grad}
    assert modules == {"q_proj", "v_proj"}
    with pytest.raises(UserError, match="LoRA on"):
        load_model(saved, lora_rank=2, lora_target_modules=["no_such_module"])


def test_reference_is_the_model_without_its_adapter(saved):
    model = with_trained_lora(saved)
    trained = logits(model)
    with without_lora(model):
        torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)
    torch.testing.assert_close(logits(model), trained, rtol=0, atol=0)
    assert (trained - logits(tiny_model())).abs().max() > 0.01
    with pytest.raises(ValueError, match="no LoRA adapter"), without_lora(tiny_model()):
        pass


def test_weights_are_copied_to_another_device_for_a_while(saved, monkeypatch):
    """There is no other device here: a copy stands for it."""
    model = load_model(saved)

    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    def spoilt() -> None:
        with on_device(model, torch.device("cpu")):
            found.extend(places())
            assert torch.equal(logits(model), expected)
            for weight in model.parameters():
                weight.data.zero_()
            raise KeyboardInterrupt

    before, found, expected = places(), list[int](), logits(tiny_model())
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    with pytest.raises(KeyboardInterrupt):
        spoilt()
    monkeypatch.undo()
    assert not set(found) & set(before)
    assert places() == before
    assert torch.equal(logits(model), expected)


def test_saved_lora_model_is_merged_and_its_adapter_lies_beside(saved, tmp_path, capfd):
    model = with_trained_lora(saved)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    assert capfd.readouterr() == ("", ""), "no progress bar of transformers between the lines of a run"
    torch.testing.assert_close(logits(load_model(tmp_path / "merged")), logits(model), rtol=1e-4, atol=1e-4)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    base = load_model(saved)
    base.load_adapter(str(tmp_path / "merged" / "adapter"))
    torch.testing.assert_close(logits(base), logits(model))


def test_merged_weights_have_the_names_of_the_plain_model_tied_ones_once(saved):
    names = [name for name, _ in merged_weights(with_trained_lora(saved))]
    assert names == sorted(set(tiny_model().state_dict()) - {"lm_head.weight"})


def test_merging_copies_one_matrix_at_a_time(saved):
    model = with_trained_lora(saved)
    adapted = [module.weight.nbytes for module in model.modules() if hasattr(module, "get_delta_weight")]
    with Live(model.parameters()) as live:
        for _ in merged_weights(model):
            pass
    assert live.peak <= 4 * max(adapted) < sum(adapted) / 2


@pytest.mark.parametrize("rank", [0, 4])
def test_saving_holds_one_shard_of_the_weights(tmp_path, monkeypatch, rank):
    """Twelve layers: a shard is less than a fifth of the model, a layer less than a shard."""
    model = tiny_model(layers=12, width=64, ffn=96, vocab_size=256)
    if rank:
        add_lora(model, rank)
    whole, shard = sum(weight.nbytes for weight in model.parameters()), 300_000
    monkeypatch.setattr("srl.model.SHARD", shard)
    layer = sum(weight.nbytes for weight in model.model.layers[0].parameters())
    with Live(model.parameters()) as live:
        save_model(model, byte_level_tokenizer(), tmp_path / "cut")
    assert live.peak <= (shard + layer if rank else 0)
    assert shard + layer < whole / 2
    files = list((tmp_path / "cut").glob("model-*-of-*.safetensors"))
    assert len(files) >= 5
    torch.testing.assert_close(logits(load_model(tmp_path / "cut")), logits(model))
    assert model_digest(tmp_path / "cut") == model_digest(model)


def test_digest_is_that_of_the_weights_wherever_they_are(saved, tmp_path):
    model = tiny_model()
    assert model_digest(saved) == model_digest(str(saved)) == model_digest(model)
    assert len(model_digest(saved)) == 32
    assert model_digest(tiny_model(seed=1)) != model_digest(model)
    assert model_digest(tiny_model(dtype=torch.bfloat16)) != model_digest(model)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert model_digest(model) != model_digest(saved)


def test_digest_does_not_depend_on_how_the_weights_are_cut_into_files(saved, tmp_path):
    tiny_model().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert model_digest(tmp_path / "shards") == model_digest(saved)


def test_digest_of_an_adapted_model_is_that_of_its_merged_directory(saved, tmp_path):
    model = with_trained_lora(saved)
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    assert model_digest(model) == model_digest(tmp_path / "merged") != model_digest(saved)


def edit(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def damage_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"\x10" + bytes(30))


def cut_short(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_a_layer(path: Path) -> None:
    edit(path, num_hidden_layers=3, layer_types=["full_attention"] * 3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.rename(path.with_name("gone")),
            "no model directory .*give a directory .*ORG",
        ),
        (lambda path: (path / "config.json").unlink(), "not a model directory.*config.json"),
        (lambda path: (path / "config.json").write_text("{"), "not a model directory.*config.json"),
        (lambda path: (path / "model.safetensors").rename(path / "model.bin"), r"no \*\.safetensors"),
        (
            lambda path: edit(path, model_type="own", auto_map={"AutoConfig": "own.C"}),
            "comes with Python code",
        ),
        (lambda path: edit(path, model_type="no-such-kind"), "could not be loaded"),
        (lose_a_layer, "incomplete: no weights for model.layers.2"),
        (damage_header, "not a safetensors file: its header does not parse"),
        (cut_short, "is truncated"),
    ],
)
def test_directory_that_is_no_model_is_refused_in_one_line(saved, damage, message):
    damage(saved)
    with pytest.raises(UserError, match=message) as caught:
        load_model(saved)
    assert "\n" not in str(caught.value)


def test_digest_of_what_is_no_model_is_refused(saved, tmp_path):
    with pytest.raises(UserError, match=r"no \*\.safetensors"):
        model_digest(tmp_path)
    damage_header(saved)
    with pytest.raises(UserError, match="not a safetensors file"):
        model_digest(saved)


def test_devices_and_dtypes_by_name():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_dtype("auto", torch.device("cpu")) == torch.float32
    assert pick_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert pick_dtype("float16", torch.device("cpu")) == torch.float16
    with pytest.raises(UserError, match="no device 'gpu'"):
        pick_device("gpu")
    with pytest.raises(UserError, match="this machine has"):
        pick_device("cuda:99")
    with pytest.raises(UserError, match="no dtype 'int4'"):
        pick_dtype("int4", torch.device("cpu"))


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_automatic_precision_is_one_that_the_gpu_computes_in(monkeypatch, native, dtype):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native)
    assert pick_dtype("auto", torch.device("cuda")) == dtype


def test_tokenizer_without_pad_and_template_gains_no_token(tmp_path):
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded, notes = load_tokenizer(tmp_path)
    assert loaded.pad_token == EOS
    assert len(loaded) == len(tokenizer)
    assert notes == ["the tokenizer has no chat template: prompts are given as plain text"]


def test_tokenizer_without_eos_is_noted(tmp_path):
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.eos_token = None
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    loaded, notes = load_tokenizer(tmp_path)
    assert loaded.eos_token is None
    assert notes == ["the tokenizer has no EOS token: a turn ends at a stop string or its token cap only"]


def test_template_with_todays_date_is_noted(tmp_path):
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }} {{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert "puts today's date into the prompts" in load_tokenizer(tmp_path)[1][0]


def test_tags_that_are_special_tokens_are_refused(tmp_path):
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_tokens(["<search>", "</search>"])
    tokenizer.save_pretrained(tmp_path / "plain")
    check_tags(load_tokenizer(tmp_path / "plain")[0], tmp_path / "plain")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    tokenizer.save_pretrained(tmp_path / "special")
    with pytest.raises(UserError, match=r"special: </answer>, <answer> are special tokens"):
        check_tags(load_tokenizer(tmp_path / "special")[0], tmp_path / "special")


def test_tokenizer_that_does_not_keep_the_tags_is_refused(tmp_path):
    """WordPiece puts spaces around the brackets, so no tag would be recognised."""
    pieces = ["[UNK]", "<", ">", "/", "who", "think", "search", "information", "answer"]
    words = Tokenizer(models.WordPiece(dict(zip(pieces, range(99), strict=False)), unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="<think>") as caught:
        check_tags(load_tokenizer(tmp_path)[0], tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("eos", ["1", [1, "2"], 1.5, True])
def test_an_eos_that_is_no_number_is_refused_with_its_file(saved, eos):
    (saved / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}), encoding="utf-8")
    with pytest.raises(UserError, match=r"generation_config\.json"):
        load_policy(Model(path=str(saved)), lambda note: None)


def test_context_is_the_shortest_that_the_configuration_states():
    assert context_of(MptConfig(max_seq_len=100, max_position_embeddings=512)) == 100


def test_context_ends_where_longrope_changes_its_frequencies():
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 99}
    usual = Qwen2Config(**sizes, max_position_embeddings=1024)
    assert context_of(usual) == 1024
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    long = Phi3Config(
        **sizes, max_position_embeddings=131072, original_max_position_embeddings=4096, pad_token_id=0,
        rope_parameters={**rope, "original_max_position_embeddings": 4096},
    )  # fmt: skip
    assert context_of(long) == 4096


def test_tokenizer_that_knows_more_than_the_model_embeds_is_noted(saved):
    edit(saved, vocab_size=10)
    assert "the model embeds only 10" in load_tokenizer(saved)[1][-1]


def test_directory_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="no tokenizer that can be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="no tokenizer directory"):
        load_tokenizer(tmp_path / "gone")


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_new_model_follows_its_seed_and_leaves_the_global_one_alone(kind):
    shape = {"vocab_size": 50, "layers": 1, "width": 16, "heads": 2, "ffn": 24}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, same, other = (new_model(kind, **shape, seed=seed) for seed in (1, 1, 2))
    assert torch.rand(1) == expected
    assert model_digest(first) == model_digest(same) != model_digest(other)


def test_parameters_are_counted_once_where_tied():
    model = new_model("llama", vocab_size=50, layers=1, width=16, heads=2, ffn=24)
    attention, mlp, norms = 4 * 16 * 16, 3 * 16 * 24, 3 * 16
    assert count_parameters(model) == 50 * 16 + attention + mlp + norms


def test_new_model_of_unknown_kind_is_refused():
    with pytest.raises(UserError, match="no kind of model 'gpt9': there are qwen2, llama"):
        new_model("gpt9", vocab_size=50, layers=1, width=16, heads=2, ffn=24)
