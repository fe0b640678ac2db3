"""Small models of random weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from srl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Kind = Literal["qwen2", "llama"]


def new_model(
    kind: Kind,
    *,
    vocab_size: int,
    layers: int,
    width: int,
    heads: int,
    ffn: int,
    kv_heads: int | None = None,
    max_length: int = 2048,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """A small float32 model with tied embeddings and random weights, the same for the same seed."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    classes = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    if kind not in classes:
        raise UserError(f"no kind of model {kind!r}: there are {', '.join(classes)}")
    make_config, make_model = classes[kind]
    config = make_config(
        vocab_size=vocab_size, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, intermediate_size=ffn, max_position_embeddings=max_length,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(config).eval()
