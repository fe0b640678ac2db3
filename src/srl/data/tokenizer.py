"""A byte-level BPE tokenizer trained on texts, for a new model."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from srl.errors import UserError

EOS = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST = 256 + 2
"""Every byte, and the two special tokens."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Byte-level BPE (GPT-2's splitting) of `texts`.

    The vocabulary is smaller than `vocab_size` where the texts have fewer pairs. EOS is `<|endoftext|>`, the
    pad token is separate; our tags are plain text of several tokens. Raises UserError for a vocabulary too
    small for all bytes.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small: expected {SMALLEST} or more (bytes, EOS, pad)"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
