"""Small models of random weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from srl.errors import UserError
from srl.files import atomic_directory
from srl.models.load import count_parameters, load_tokenizer
from srl.models.weights import save_model

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


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of a model."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 256
    """Width inside a layer's feed-forward block."""
    max_length: int = 4096
    """Context length in tokens: the prompt and everything after it."""


@dataclass(frozen=True, slots=True)
class Made:
    """The written model: its number of parameters and the size of its vocabulary."""

    directory: Path
    parameters: int
    vocabulary: int


def make_model(
    tokenizer: Path, out: Path, *, kind: Kind = "qwen2", sizes: Sizes | None = None, seed: int = 0
) -> Made:
    """Write a model of random weights for `tokenizer` to the new directory `out`, whole or not at all.

    Raises UserError for heads that do not share the width, for a directory without a tokenizer, and if `out`
    exists.
    """
    sizes = sizes or Sizes()
    if sizes.width % (2 * sizes.heads):
        raise UserError(
            f"--width {sizes.width} does not divide into {sizes.heads} heads of even width: "
            f"choose a multiple of {2 * sizes.heads}"
        )
    with atomic_directory(out) as folder:
        words, _ = load_tokenizer(tokenizer)
        rows = max(words.get_vocab().values()) + 1  # ids may have gaps
        model = new_model(
            kind, vocab_size=rows, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
            seed=seed, **asdict(sizes),
        )  # fmt: skip
        save_model(model, words, folder)
    return Made(out, count_parameters(model), rows)
