"""What the tests here put together: a second retriever, a live one, and a cross-encoder of two layers."""

from pathlib import Path

import torch
from tests.tiny_models import louder
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from srl.trajectory import Passage

TEXTS = {
    "genoa": '"Genoa"\nThe lighthouse of Genoa is tall.',
    "kenya": '"Kenya"\nMount Kenya is a volcano.',
    "curie": '"Marie Curie"\nShe found radium and polonium.',
    "radium": '"Radium"\nRadium glows in the dark.',
    "port": '"Port"\nA port has a lighthouse.',
}
PASSAGES = [Passage(name, contents) for name, contents in TEXTS.items()]

PLUGIN = """
    from pydantic import BaseModel, ConfigDict, Field
    from srl.index import Fault, RetrieverBase
    from srl.index.passages import PassageStore, keep_passages
    from srl.plugins import hookimpl
    from srl.trajectory import Hit, Passage

    BUILT = []
    WEIGHTS = ["aaaa"]

    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")
        size: int = 3
        threads: int = Field(default=1, json_schema_extra={"runtime": True})

    class Letters(RetrieverBase):
        "Scores a passage by the share of the query's pieces of `size` letters that it holds."
        name = "letters"
        resumable = True

        def __init__(self, options):
            self.options = options

        def identity(self):
            return {"encoder": WEIGHTS[0]}

        def build(self, passages, directory, progress):
            store = keep_passages(passages, directory)
            (directory / self.name).mkdir(exist_ok=True)
            (directory / self.name / "size").write_text(str(self.options.size))
            BUILT.append(self.name)
            for count, _ in enumerate(store, start=1):
                progress(count)

        def open(self, directory):
            self.store = PassageStore(directory / "passages")

        def search(self, queries, k):
            return [self.one(query, k) for query in queries]

        def one(self, query, k):
            if "boom" in query:
                raise Fault("timed_out", "too slow", 2.0)
            if "crash" in query:
                raise OSError("the disk is gone")
            pieces = {query[i:i + self.options.size].lower() for i in range(len(query) - self.options.size)}
            hits = [Hit(passage, sum(piece in passage.contents.lower() for piece in pieces) / len(pieces))
                    for passage in self.store] if pieces else []
            return sorted((hit for hit in hits if hit.score), key=lambda hit: -hit.score)[:k]

    class Outside:
        name = "outside"
        live = True

        def open(self, directory):
            self.opened = directory

        def search(self, queries, k):
            return [[Hit(Passage(f"u{n}", f"{query} {n}"), 1.0) for n in range(k)] for query in queries]

    @hookimpl
    def srl_retrievers(register):
        register("letters", Letters, "pieces of words", options=Options)
        register("outside", Outside, "live")
"""

WORDS = "[PAD] [UNK] [CLS] [SEP] " + " ".join(
    sorted(
        {word for text in TEXTS.values() for word in text.lower().replace('"', "").replace(".", "").split()}
    )
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of the passages above, in lower case; a pair is [CLS] a [SEP] b [SEP]."""
    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names)


def cross_encoder(directory: Path, labels: int = 1, seed: int = 0) -> Path:
    """A random one whose scores are far enough apart to tell passages by, saved as a model is."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS.split()), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, num_labels=labels,
    )  # fmt: skip
    louder(BertForSequenceClassification(config)).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
