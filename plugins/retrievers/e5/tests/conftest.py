"""A BERT of two layers with random weights and its WordPiece tokenizer, made on the spot."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from srl.testing.retrievers import CORPUS, QUERIES
from srl.trajectory import Passage
from srl_e5.encoder import Encoder

WORDS = [
    "red", "green", "blue", "fox", "dog", "whale", "sea", "lighthouse", "sings", "runs", "swims", "near",
    "far",
]  # fmt: skip
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_encoder(directory: Path, *, pooler: bool = True, seed: int = 0, width: int = 32) -> Path:
    """Save model and tokenizer as `directory`; weights are large enough to tell texts apart."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts = [*(passage.contents for passage in CORPUS), *QUERIES, *WORDS * 9]
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(tokenizer.get_vocab()), hidden_size=width, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=2 * width, max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=pooler)
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.mul_(10)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name says e5; nothing may write into its directory."""
    return write_encoder(tmp_path_factory.mktemp("models") / "tiny-e5")


@pytest.fixture(scope="session")
def another(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape, and no pooler."""
    return write_encoder(tmp_path_factory.mktemp("models") / "other-minilm", pooler=False, seed=1)


@pytest.fixture
def make_encoder(tmp_path: Path) -> Callable[..., Path]:
    """A model of the test's own, by name."""
    return lambda name, **shape: write_encoder(tmp_path / name, **shape)


@pytest.fixture(scope="session")
def corpus() -> list[Passage]:
    """60 passages of 1 to 20 words."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda high: int(torch.randint(high, (), generator=generator))  # noqa: E731
    texts = [" ".join(WORDS[draw(len(WORDS))] for _ in range(1 + draw(20))) for _ in range(60)]
    return [Passage(f"p{row}", f'"{row}"\n{text}') for row, text in enumerate(texts)]


@pytest.fixture
def embedded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that went through the encoder."""
    texts: list[str] = []
    working = Encoder.passages

    def passages(self, given, report=None):
        texts.extend(given)
        return working(self, given, report)

    monkeypatch.setattr(Encoder, "passages", passages)
    return texts
