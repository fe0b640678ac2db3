"""A byte-level BPE tokenizer trained on a corpus, saved as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from srl.data.corpus import read_corpus
from srl.data.parquet import read_questions
from srl.errors import UserError
from srl.files import atomic_directory, files_in, replaceable, write_manifest

KIND = "tokenizer"
EOS = "<|endoftext|>"
PAD = "<|pad|>"
SMALLEST = 256 + 2
"""Every byte, and the two special tokens."""


def texts_of(corpora: Iterable[Path], questions: Iterable[Path] = ()) -> Iterator[str]:
    """The passages of corpus files, and the prompts and questions of training files."""
    for path in corpora:
        yield from (passage.contents for passage in read_corpus(path))
    for path in questions:
        for question in read_questions(path):
            yield from (message["content"] for message in question.prompt)
            yield question.text


def train_tokenizer(
    texts: Iterable[str], out: Path | str, vocab_size: int = 4096, *, overwrite: bool = False
) -> int:
    """Train byte-level BPE (GPT-2's splitting) on `texts`, save it to `out`, return the vocabulary's size.

    The size is below `vocab_size` where the texts have fewer pairs. EOS is `<|endoftext|>`, the pad token is
    separate; our tags are plain text of several tokens. `overwrite` replaces a tokenizer that an earlier call
    wrote. Raises UserError for a vocabulary too small for all bytes.
    """
    if vocab_size < SMALLEST:
        raise UserError(
            f"a vocabulary of {vocab_size} is too small: expected {SMALLEST} or more (bytes, EOS, pad)"
        )
    replace = replaceable(KIND, "a tokenizer that srl trained") if overwrite else None
    with atomic_directory(out, replace=replace) as folder:
        tokenizer = _train(texts, vocab_size)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)
        fast.save_pretrained(str(folder))
        write_manifest(folder, KIND, {"files": files_in(folder)})
    return tokenizer.get_vocab_size()


def _train(texts: Iterable[str], vocab_size: int) -> Tokenizer:
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
    return tokenizer
