"""Sequence classifiers made on the spot: one that reads a chat, one that reads a pair of texts."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"


def of_bytes(**settings: object) -> PreTrainedTokenizerFast:
    """A token for each byte, after the padding token."""
    alphabet = ["<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<|pad|>", **settings)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """With three special tokens that open and close a message."""
    made = of_bytes(eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    made.chat_template = CHAT
    return made


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def chat_model(folder: Path, *, labels: int = 1, pad: int | None = 0, longest: int = 512) -> Path:
    """A causal model with a score head on the last token, as most reward models are."""
    tokenizer = chat_tokenizer()
    config = Qwen2Config(
        **SIZES, vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=longest,
        num_labels=labels, pad_token_id=pad,
    )  # fmt: skip
    return saved(Qwen2ForSequenceClassification, config, "score", tokenizer, folder)


def pair_model(folder: Path) -> Path:
    """An encoder that reads question and answer with a separator and token types between them."""
    tokenizer = of_bytes(model_input_names=["input_ids", "token_type_ids", "attention_mask"])
    config = BertConfig(
        **SIZES, vocab_size=len(tokenizer), max_position_embeddings=256, num_labels=2, pad_token_id=0
    )
    return saved(BertForSequenceClassification, config, "classifier", tokenizer, folder)


def saved(
    kind: type[PreTrainedModel],
    config: PretrainedConfig,
    head: str,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
) -> Path:
    """Random weights, the same each time, with a `head` large enough to tell texts apart."""
    torch.manual_seed(0)
    made = kind(config)
    with torch.no_grad():
        getattr(made, head).weight.mul_(50)
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
