"""`--model FILE.gguf`: it becomes a directory with the same logits, once; a file at fault is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.tiny_models import EOS, PAD, byte_level_tokenizer, tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from srl.config import Config, load_config
from srl.errors import UserError
from srl.models.load import load_model, load_tokenizer
from srl.train import convert_gguf
from srl.train.fetch_models import with_local_models
from srl.train.model_card import base_model
from srl.workspace import Workspace

gguf = pytest.importorskip("gguf")
TEXT = "Who built the lighthouse of Velmar? <search>Velmar</search>"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


_EOS, _PAD, _START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
"""The special tokens of Qwen2's instruct models; transformers adds them to a vocabulary that lacks one."""


def small() -> PreTrainedModel:
    """A file's vocabulary is its tokenizer's, here with one more word."""
    return tiny_model(vocab_size=len(byte_level_tokenizer()) + 1)


def write_gguf(file: Path, kind: str = "qwen2", with_tokenizer: bool = True) -> None:
    """The tiny Qwen2, as llama.cpp's converter names its parts; `kind` is what the file claims."""
    model, tokenizer = small(), byte_level_tokenizer()
    sizes, writer = model.config, gguf.GGUFWriter(file, kind)
    writer.add_context_length(sizes.max_position_embeddings)
    writer.add_embedding_length(sizes.hidden_size)
    writer.add_block_count(sizes.num_hidden_layers)
    writer.add_feed_forward_length(sizes.intermediate_size)
    writer.add_head_count(sizes.num_attention_heads)
    writer.add_head_count_kv(sizes.num_key_value_heads)
    writer.add_layer_norm_rms_eps(sizes.rms_norm_eps)
    writer.add_rope_freq_base(sizes.rope_parameters["rope_theta"])
    if with_tokenizer:
        _add_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, sizes.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    parts = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    special = (tokenizer.convert_tokens_to_ids(EOS), tokenizer.convert_tokens_to_ids(PAD))
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    kinds = [control if number in special else normal for number in range(len(parts["vocab"]))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    words = [
        {EOS: _EOS, PAD: _PAD}.get(word, word) for word in sorted(parts["vocab"], key=parts["vocab"].get)
    ]
    writer.add_token_list([*words, _START])
    writer.add_token_types([*kinds, control])
    writer.add_token_merges([" ".join(merge) for merge in parts["merges"]])
    writer.add_eos_token_id(special[0])
    writer.add_pad_token_id(special[1])
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "tiny.Q8.gguf"
    write_gguf(file)
    return file


def configured(file: Path, **settings: object) -> Config:
    given = {key.replace("__", "."): value for key, value in settings.items()}
    return load_config("tiny", flags={"model.path": str(file), "model.device": "cpu", **given}).config


def converted(file: Path, said: list[str] | None = None, **settings: object) -> Path:
    note = [].append if said is None else said.append
    return Path(str(with_local_models(configured(file, **settings), Workspace.resolve(), note).model.path))


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def test_a_gguf_file_becomes_a_directory_with_the_same_logits_and_tokens(written, workspace):
    said: list[str] = []
    directory = converted(written, said)
    assert directory.parent == workspace / "models"
    assert directory.name.startswith("tiny.Q8-float32-")
    assert said == [f"converting {written} in float32, once, to {directory}"]
    source = {"pretrained_model_name_or_path": written.parent, "gguf_file": written.name}
    theirs = AutoTokenizer.from_pretrained(**source)
    tokenizer, notes = load_tokenizer(directory)
    ids = theirs.encode(TEXT)
    assert tokenizer.encode(TEXT) == ids == byte_level_tokenizer().encode(TEXT)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.chat_template) == (_EOS, _PAD, TEMPLATE)
    assert notes == []
    expected = logits(AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32), ids)
    assert torch.equal(logits(load_model(directory), ids), expected)
    torch.testing.assert_close(expected, logits(small(), ids))


def test_it_is_converted_once_for_each_precision_and_content(written, tmp_path):
    said: list[str] = []
    first = converted(written, said)
    copy = tmp_path / "copy" / written.name
    copy.parent.mkdir()
    shutil.copy(written, copy)
    assert converted(copy, said) == first
    assert len(said) == 1
    half = converted(written, said, model__dtype="bfloat16")
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(half / "model.safetensors").values()} == {torch.bfloat16}
    assert half != first
    with open(copy, "ab") as file:
        file.write(b"\0")
    assert converted(copy, said).name not in (first.name, half.name)


def test_a_reference_may_be_a_gguf_file_and_the_card_names_the_file(written):
    config = configured(written, ref__path=str(written), actor__use_kl_loss=True)
    found = with_local_models(config, Workspace.resolve(), lambda text: None)
    assert found.ref.path == found.model.path
    assert base_model(Path(str(found.model.path))) == {"base_model": written.name}


def refused(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        converted(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert not list(Workspace.resolve().models.glob("*"))
    return str(caught.value)


@pytest.mark.parametrize("kept", [4, 20, 2000, 20_000])
def test_a_damaged_file_is_one_line_and_leaves_nothing(written, tmp_path, kept):
    file = tmp_path / "cut.gguf"
    file.write_bytes(written.read_bytes()[:kept])
    refused(file)


def test_what_is_no_gguf_file_is_one_line(tmp_path, monkeypatch, written):
    assert "no GGUF file" in refused(tmp_path / "gone.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    assert "is not a GGUF file" in refused(tmp_path / "text.gguf")
    monkeypatch.setattr(convert_gguf, "find_spec", lambda name: None)
    assert "[gguf]'" in refused(written)
