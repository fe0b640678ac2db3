"""Small random models, and a byte-level BPE tokenizer in which tags are several tokens and overhang."""

from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

EOS = "<|end|>"
PAD = "<|pad|>"
_SENTENCES = (
    "<think>I do not know who built the lighthouse of Velmar, so I search.</think>",
    "<search>who built the lighthouse of Velmar</search>.\n",
    '\n\n<information>Doc 1(Title: "Velmar") The lighthouse was built by Ossa Trell.</information>\n\n',
    "<think>Now I know.</think><answer>Ossa Trell</answer>.\n",
    "<search>mayor of Quillon</search>\n\n<search>sea near Quillon</search>\n\n",
    "Question: which sea lies near the town of Quillon? a > b, b > c, c >> d; x -> y.\n",
)  # fmt: skip


@cache
def byte_level_tokenizer(vocabulary: int = 400) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained here on a few made-up sentences, with Qwen's way of splitting a text.

    No tag is one token, and a closing `>` merges with what follows it (`>.`, `>\\n\\n`).
    """
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD)


CLASSES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def new_model(
    kind: str,
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
    make_config, make_model = CLASSES[kind]
    config = make_config(
        vocab_size=vocab_size, num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads, intermediate_size=ffn, max_position_embeddings=max_length,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=eos_token_id, pad_token_id=pad_token_id,
        attn_implementation="sdpa",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make_model(config).eval()


def tiny_model(
    kind: str = "qwen2",
    *,
    vocab_size: int = 400,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **sizes: int,
) -> PreTrainedModel:
    """A random model of two layers whose logits are far enough apart to tell right from wrong."""
    shape = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "ffn": 48, "max_length": 512} | sizes
    model = new_model(kind, vocab_size=vocab_size, eos_token_id=0, pad_token_id=1, seed=seed, **shape)
    return louder(model).to(dtype)


@torch.no_grad()
def louder(model: PreTrainedModel) -> PreTrainedModel:
    """The model with logits some units apart."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)
    return model.eval()


class Bigram(torch.nn.Module):
    """A causal language model that looks at one token only: its logits are exact in any batch.

    `logits` (V, V): row i holds those that follow token i.
    """

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)
        self.config = PretrainedConfig(vocab_size=len(logits))
        self.dtype, self.device = logits.dtype, logits.device

    def forward(self, input_ids: torch.Tensor, **kwargs: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits[input_ids])

    @classmethod
    def saying(cls, *texts: list[int], vocabulary: int = 400) -> "Bigram":
        """A model that continues each of `texts` as given, where no token has two successors."""
        logits = torch.zeros(vocabulary, vocabulary)
        for first, second in (pair for text in texts for pair in pairwise(text)):
            assert logits[first].max() in (0, logits[first, second]), "a token with two successors"
            logits[first, second] = 50.0
        return cls(logits)
