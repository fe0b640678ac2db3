"""Small tokenizers of the kinds that models come with, trained on made-up sentences."""

from functools import cache
from string import printable

from tests.tiny_models import EOS, byte_level_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "I do not know who built the lighthouse of Velmar, so I search.",
    "<search> who built the lighthouse </search>\n\n<information>Doc 1(Title: Velmar) built by Ossa Trell",
    "</information>\n\n<think>Now I know.</think> <answer> Ossa Trell in 1912. </answer>.\n",
    "My previous action is invalid. Question: which sea lies near the town? a > b, 0 > 1; x -> y.\n",
    " ".join(printable),
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@cache
def made_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """`byte-level`, `byte-level-prefix`, `metaspace-SCHEME`, `unigram-SCHEME` or `legacy`, as Llama 2's."""
    if kind == "byte-level":
        return byte_level_tokenizer()
    name, _, scheme = kind.partition("-")
    if name == "unigram":
        tokenizer, special = Tokenizer(models.Unigram()), [EOS, "<unk>"]
        trainer = trainers.UnigramTrainer(
            vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False
        )
    else:
        fallback = name != "byte"
        tokenizer = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>" if fallback else None))
        special = [EOS, "<unk>", *BYTES] if fallback else [EOS]
        alphabet = [] if fallback else pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=620, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    if name == "byte":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    elif name == "legacy":
        marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(marks)
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*spaces, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=name == "metaspace")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.train_from_iterator(SENTENCES * 20, trainer)
    unknown = "<unk>" if "<unk>" in special else None
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, unk_token=unknown)
