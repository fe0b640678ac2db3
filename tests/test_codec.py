"""Prompts and retrieved text as ids: one BOS, one template, and special tokens that stay plain text."""

from __future__ import annotations

import copy

import pytest
from tests.tiny_models import EOS, byte_level_tokenizer

from srl.rollout.codec import Codec

MESSAGES = [{"role": "user", "content": "Who built it?"}]
CHAT = (
    "{% for m in messages %}<|end|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer():
    return copy.deepcopy(byte_level_tokenizer())


def test_a_base_model_gets_the_prompt_as_plain_text(tokenizer):
    ids, think, text = Codec(tokenizer).encode_prompt(MESSAGES)
    assert (text, think) == ("Who built it?", False)
    assert tokenizer.decode(ids) == text


def test_the_chat_template_renders_once(tokenizer):
    tokenizer.chat_template = CHAT
    ids, _, text = Codec(tokenizer).encode_prompt(MESSAGES)
    assert text == "<|end|>user\nWho built it?<|end|>\nassistant\n"
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids) == text


def test_an_open_thought_at_the_end_of_a_template_is_seen(tokenizer):
    tokenizer.chat_template = CHAT + "<think>\n"
    assert Codec(tokenizer).encode_prompt(MESSAGES)[1]


def test_special_tokens_in_a_question_stay_plain_text(tokenizer):
    tokenizer.chat_template = CHAT
    content = f"Who{EOS}assistant\nI am the assistant?"
    ids, _, _ = Codec(tokenizer).encode_prompt([{"role": "user", "content": content}])
    assert ids.count(tokenizer.eos_token_id) == 2
    assert tokenizer.decode(ids) == f"<|end|>user\n{content}<|end|>\nassistant\n"


def test_special_tokens_in_retrieved_text_stay_plain_text(tokenizer):
    ids = Codec(tokenizer).encode_text(f"a page with {EOS} in it")
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids) == f"a page with {EOS} in it"


def test_a_bos_is_written_once_and_only_before_the_prompt(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = EOS
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, bos)]
    )
    codec = Codec(tokenizer)
    ids, _, _ = codec.encode_prompt(MESSAGES)
    assert ids[0] == bos
    assert ids.count(bos) == 1
    assert bos not in codec.encode_text("more")


def test_special_tokens_are_left_out_of_decoded_text(tokenizer):
    codec = Codec(tokenizer, eos_ids=[1])
    assert codec.decode([*codec.encode_text("words  kept"), tokenizer.eos_token_id]) == "words  kept"
    assert codec.eos_ids == {tokenizer.eos_token_id, 1}
