"""Models and tokenizers: what loads, what is refused, and what a saved directory holds."""

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
    GenerationConfig,
    MptConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from srl.config.sections import Model
from srl.errors import UserError
from srl.models.check import context_of
from srl.models.load import check_tags, load_model, load_tokenizer, on_device, pick_device, pick_dtype
from srl.models.weights import has_lora, merged_weights, model_digest, save_model
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


def test_saved_model_loads_as_it_was_with_the_dtype_and_attention_asked_for(saved):
    model = load_model(saved, device="cpu")
    assert (model.dtype, model.training) == (torch.float32, False)
    torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)
    model = load_model(saved, dtype="bfloat16", attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")


def test_a_model_without_sdpa_has_eager_attention_and_says_so(tmp_path):
    save_model(families.build("gpt_oss"), byte_level_tokenizer(), tmp_path / "model")
    section = Model(path=str(tmp_path / "model"), device="cpu")
    said: dict[str, list[str]] = {"auto": [], "eager": []}
    for typed, notes in said.items():
        policy = load_policy(section.model_copy(update={"attn_implementation": typed}), notes.append)
        assert policy.model.config._attn_implementation == "eager"
    assert len(said["auto"]) == len(said["eager"]) + 1
    with pytest.raises(UserError):
        load_model(tmp_path / "model", attn_implementation="sdpa")


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
    with pytest.raises(UserError) as refused:
        load_model(saved, lora_rank=2, lora_target_modules=["lm_head"], cast_lm_head_to_fp32=True)
    assert refused.value.key == "model.cast_lm_head_to_fp32"


def test_saved_directory_tells_others_where_a_turn_ends_and_the_model_keeps_its_own_settings(tmp_path):
    model = tiny_model()
    for name, strings in (("default", STOP_STRINGS), ("none", ())):
        save_model(model, byte_level_tokenizer(), tmp_path / name, stop_strings=strings)
        stops = GenerationConfig.from_pretrained(tmp_path / name).stop_strings
        assert stops == (list(strings) or None)
    assert model.generation_config.stop_strings is None


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
    with pytest.raises(ValueError):
        model.save_pretrained(tmp_path / "refused")
    save_model(model, byte_level_tokenizer(), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert written.items() >= {**saved, "stop_strings": list(STOP_STRINGS)}.items()
    assert {name: getattr(model.generation_config, name) for name in given} == given


def test_fresh_adapter_changes_nothing_and_is_all_that_trains(saved):
    model = load_model(saved, lora_rank=2, lora_target_modules=["q_proj", "v_proj"])
    assert has_lora(model)
    torch.testing.assert_close(logits(model), logits(tiny_model()), rtol=0, atol=0)
    trained = [name.split(".")[-4:-2] for name, weight in model.named_parameters() if weight.requires_grad]
    assert {tuple(names) for names in trained} == {
        (module, factor) for module in ("q_proj", "v_proj") for factor in ("lora_A", "lora_B")
    }
    with pytest.raises(UserError):
        load_model(saved, lora_rank=2, lora_target_modules=["no_such_module"])


def test_weights_are_copied_to_another_device_for_a_while(saved, monkeypatch):
    """There is no other device here: a copy stands for it."""
    model = load_model(saved)

    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]

    def spoilt() -> None:
        with on_device(model, torch.device("cpu")):
            copies.extend(places())
            assert torch.equal(logits(model), expected)
            for weight in model.parameters():
                weight.data.zero_()
            raise KeyboardInterrupt

    before, copies, expected = places(), list[int](), logits(tiny_model())
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor.clone())
    with pytest.raises(KeyboardInterrupt):
        spoilt()
    monkeypatch.undo()
    assert not set(copies) & set(before)
    assert places() == before
    assert torch.equal(logits(model), expected)


def test_saving_says_nothing_and_merging_copies_one_matrix_at_a_time(saved, tmp_path, capfd):
    model = with_trained_lora(saved)
    save_model(model, byte_level_tokenizer(), tmp_path / "merged")
    assert capfd.readouterr() == ("", ""), "no progress bar of transformers between the lines of a run"
    adapted = [module.weight.nbytes for module in model.modules() if hasattr(module, "get_delta_weight")]
    with Live(model.parameters()) as live:
        names = [name for name, _ in merged_weights(model)]
    assert live.peak <= 4 * max(adapted) < sum(adapted) / 2
    assert names == sorted(set(tiny_model().state_dict()) - {"lm_head.weight"}), "tied ones once"


def test_digest_is_that_of_the_weights_wherever_they_are(saved, tmp_path):
    model = tiny_model()
    assert model_digest(saved) == model_digest(str(saved)) == model_digest(model)
    assert model_digest(tiny_model(seed=1)) != model_digest(model)
    assert model_digest(tiny_model(dtype=torch.bfloat16)) != model_digest(model)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert model_digest(tmp_path / "shards") == model_digest(saved)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    assert model_digest(model) != model_digest(saved)


def test_a_model_with_code_of_its_own_is_refused_by_the_key_that_would_run_it(saved):
    config = json.loads((saved / "config.json").read_text())
    changes = {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}
    (saved / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError) as refused:
        load_model(saved)
    assert refused.value.key == "model.trust_remote_code"


def test_devices_and_dtypes_by_name(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert pick_device("cpu") == cpu
    assert pick_dtype("auto", cpu) == torch.float32
    assert pick_dtype("float16", cpu) == torch.float16
    for refused in ("gpu", "cuda:99"):
        with pytest.raises(UserError):
            pick_device(refused)
    with pytest.raises(UserError):
        pick_dtype("int4", cpu)
    assert pick_dtype("auto", gpu) == torch.bfloat16
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    assert pick_dtype("auto", gpu) == torch.float32, "the GPU only emulates bfloat16"


@pytest.mark.parametrize(
    ("changes", "notes"),
    [
        ({"pad_token": None}, 1),
        ({"eos_token": None, "chat_template": "{{ messages }}"}, 1),
        ({"chat_template": "{{ strftime_now('%d %b %Y') }} {{ messages }}"}, 1),
        ({"chat_template": "{{ messages }}"}, 0),
    ],
)
def test_what_a_tokenizer_lacks_is_noted_and_no_token_is_added(tmp_path, changes, notes):
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(tmp_path)
    loaded, said = load_tokenizer(tmp_path)
    assert len(said) == notes
    assert len(loaded) == len(tokenizer)
    assert loaded.pad_token is not None
    assert loaded.eos_token == (EOS if "eos_token" not in changes else None)


def test_tags_that_cannot_be_recognised_are_refused():
    """Special tokens are left out of a text, and WordPiece puts spaces around the brackets."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_tokens(["<search>", "</search>"])
    check_tags(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "</answer>"]})
    pieces = ["[UNK]", "<", ">", "/", "who", "think", "search", "information", "answer"]
    words = Tokenizer(models.WordPiece(dict(zip(pieces, range(99), strict=False)), unk_token="[UNK]"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    for refused in (tokenizer, PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")):
        with pytest.raises(UserError):
            check_tags(refused)


def test_context_is_the_shortest_stated_and_ends_where_longrope_changes_its_frequencies():
    assert context_of(MptConfig(max_seq_len=100, max_position_embeddings=512)) == 100
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 99}
    assert context_of(Qwen2Config(**sizes, max_position_embeddings=1024)) == 1024
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    long = Phi3Config(
        **sizes, max_position_embeddings=131072, original_max_position_embeddings=4096, pad_token_id=0,
        rope_parameters={**rope, "original_max_position_embeddings": 4096},
    )  # fmt: skip
    assert context_of(long) == 4096
