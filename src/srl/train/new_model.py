"""A small model from scratch: random weights for a tokenizer, as the directory that training starts from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from srl.errors import UserError
from srl.files import atomic_directory
from srl.model import count_parameters, load_tokenizer, new_model, save_model

Kind = Literal["qwen2", "llama"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The shape of a model: its layers, its width, the heads that share the width, and its reach."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    ffn: int = 256
    """Width inside a layer's feed-forward block."""
    max_length: int = 4096
    """Tokens that it reads at once: a prompt and all that follows."""


@dataclass(frozen=True, slots=True)
class Made:
    """What was written: how many numbers the model has, and how many tokens it knows."""

    directory: Path
    parameters: int
    vocabulary: int


def make_model(
    tokenizer: Path, out: Path, *, kind: Kind = "qwen2", sizes: Sizes | None = None, seed: int = 0
) -> Made:
    """Write a model of random weights for `tokenizer` to the new directory `out`, whole or not at all.

    The same arguments make the same weights. Raises UserError for a kind or sizes that make no model,
    for a directory without a tokenizer, and where `out` exists.
    """
    sizes = sizes or Sizes()
    _check(sizes)
    with atomic_directory(out) as folder:
        words, _ = load_tokenizer(tokenizer)
        model = new_model(
            kind, vocab_size=_embedded(words), layers=sizes.layers, width=sizes.width, heads=sizes.heads,
            ffn=sizes.ffn, max_length=sizes.max_length, eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id, seed=seed,
        )  # fmt: skip
        save_model(model, words, folder)
    return Made(out, count_parameters(model), model.config.vocab_size)


def _check(sizes: Sizes) -> None:
    if sizes.width % (2 * sizes.heads):
        raise UserError(
            f"a width of {sizes.width} does not go into {sizes.heads} heads of an even width each: "
            f"choose a multiple of {2 * sizes.heads}"
        )


def _embedded(tokenizer: Any) -> int:
    """Rows of the embedding: one past the highest id, for the ids of a tokenizer may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
