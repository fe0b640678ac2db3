"""`srl train init`: a small model of random weights for a tokenizer."""

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

    The same arguments make the same weights. Raises UserError for sizes that do not fit together, for a
    directory without a tokenizer, and if `out` exists.
    """
    sizes = sizes or Sizes()
    _check(sizes)
    with atomic_directory(out) as folder:
        words, _ = load_tokenizer(tokenizer)
        model = new_model(
            kind, vocab_size=_rows(words), layers=sizes.layers, width=sizes.width, heads=sizes.heads,
            ffn=sizes.ffn, max_length=sizes.max_length, eos_token_id=words.eos_token_id,
            pad_token_id=words.pad_token_id, seed=seed,
        )  # fmt: skip
        save_model(model, words, folder)
    return Made(out, count_parameters(model), model.config.vocab_size)


def _check(sizes: Sizes) -> None:
    if sizes.width % (2 * sizes.heads):
        raise UserError(
            f"--width {sizes.width} does not divide into {sizes.heads} heads of even width: "
            f"choose a multiple of {2 * sizes.heads}"
        )


def _rows(tokenizer: Any) -> int:
    """Rows of the embedding: the highest id + 1, since the ids of a tokenizer may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1
