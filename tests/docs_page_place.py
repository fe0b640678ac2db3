"""A directory in which the commands of the pages run: small stand-ins under every name that they use."""

import gzip
import json
import shutil
from pathlib import Path

from tests.docs_page_lines import ROOT, blocks_of
from tests.import_inputs import search_r1
from tests.tiny_models import byte_level_tokenizer, new_model, tiny_model
from tests.training import PASSAGES, config, questions, tokenizer, train
from transformers import BertConfig, BertForSequenceClassification, BertModel

from srl.cli import main
from srl.data.corpus import write_corpus
from srl.data.parquet import write_questions
from srl.data.write_world import write_world
from srl.index import build_index
from srl.models.weights import save_model

TEXTS = {
    "Darwin": "Charles Darwin wrote the Origin of Species, which was printed in London in 1859.",
    "Red fox": "The red fox lives near Rome, the capital city of the country, and hunts at night.",
    "Lanterna": "The Lanterna is the lighthouse of Genoa; Ossa Trell built it in 1543.",
    "Berlin": "Berlin ist die Hauptstadt von Deutschland und liegt an der Spree.",
    **{f"Town {number}": f"Town {number} has the mayor Ada {number}." for number in range(20)},
}
ASKED = {
    "Darwin": ("Who wrote the Origin of Species?", "Charles Darwin"),
    "Red fox": ("Where does the red fox live?", "Rome"),
    "Lanterna": ("Who built the Lanterna?", "Ossa Trell"),
    "Berlin": ("Which river flows through Berlin?", "Spree"),
    **{f"Town {number}": (f"Who is the mayor of Town {number}?", f"Ada {number}") for number in range(20)},
}
API = """\
url: http://127.0.0.1:9/find
body: {q: "{query}", lang: "{language}"}
results: hits
title: title
text: text
"""


def write_place(folder: Path) -> Path:
    """Corpora, questions, indexes, models, encoders, a script, configurations and a workspace with a run."""
    folder.mkdir(parents=True)
    write_questions_and_corpora(folder)
    write_trec(folder)
    write_models(folder)
    for name in ("my-index", "other-index", "plain", "wiki18", "indexes/wiki18", "indexes/news"):
        build_index(folder / "corpus.jsonl", folder / name, "bm25", {})
    build_index(folder / "corpus.jsonl", folder / "stemmed", "bm25", {"stopwords": "none"})
    (folder / "train_grpo.sh").write_text(search_r1(), encoding="utf-8")
    for name in ("grpo.yaml", "my.yaml"):
        (folder / name).write_text("extends: tiny\nalgorithm: {name: grpo}\n", encoding="utf-8")
    (folder / "my-api.yaml").write_text(API, encoding="utf-8")
    [settings] = blocks_of((ROOT / "docs" / "training.md").read_text(encoding="utf-8"), "yaml")
    (folder / "mine.yaml").write_text(settings, encoding="utf-8")
    write_plugins(folder)
    write_world(folder / "srl-workspace" / "worlds" / "world-s0", 0)
    write_run(folder)
    return folder


def write_questions_and_corpora(folder: Path) -> None:
    """SQuAD and 2Wiki as published, and what `srl data prepare` makes of them, by every name of a page."""
    squad = json.dumps({"version": "1.1", "data": [_article(title) for title in TEXTS]})
    wiki = json.dumps([{"title": title, "text": text} for title, text in TEXTS.items()])
    files = {"train.json": squad, "squad.json": squad, "dev-v1.1.json": squad, "train-v1.1.json": squad,
             "corpus.json": wiki, "2wikimultihopqa_corpus.json": wiki}  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    given = f"squad={folder / 'squad.json'}", "--out", str(folder / "prepared")
    assert main(["data", "prepare", *given]) == 0
    lines = (folder / "prepared" / "corpus.jsonl").read_bytes()
    for name in ("corpus.jsonl", "wiki-18.jsonl", "korpus.jsonl", "my-passages.jsonl"):
        (folder / name).write_bytes(lines)
    for name in ("corpus", "wiki18-corpus"):
        (folder / name).mkdir()
        (folder / name / "wiki-18.jsonl.gz").write_bytes(gzip.compress(lines))
    shown = [
        {"question": asked, "golden_answers": [gold], "turns": [f"<answer> {gold} </answer>"]}
        for asked, gold in ASKED.values()
    ]
    own = [{"question": asked, "golden_answers": [gold]} for asked, gold in ASKED.values()]
    rows_of = {"shown.jsonl": shown, "demonstrations.jsonl": shown[:1], "my-questions.jsonl": own}
    for name, rows in rows_of.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    for name in ("train", "validation", "test", "data/test/test"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / "prepared" / "train.parquet", folder / f"{name}.parquet")


def _article(title: str) -> dict[str, object]:
    text, (question, gold) = TEXTS[title], ASKED[title]
    answers = [{"text": gold, "answer_start": text.index(gold)}]
    asked = {"id": title, "question": question, "answers": answers}
    return {"title": title, "paragraphs": [{"context": text, "qas": [asked]}]}


def write_trec(folder: Path) -> None:
    """The same as TREC's documents, topics and judgements."""
    documents, topics, judgements = [], [], []
    for number, (title, text) in enumerate(TEXTS.items(), 1):
        documents.append(f"<doc><docno>{number}</docno><title>{title}</title><text>{text}</text></doc>\n")
        topics.append(f"<top><num>{number}</num><title>{ASKED[title][0]}</title></top>\n")
        judgements.append(f"{number} 0 {number} 1\n")
    (folder / "cran.all.1400.xml").write_text("".join(documents), encoding="utf-8")
    (folder / "cran.qry.xml").write_text("".join(topics), encoding="utf-8")
    (folder / "cranqrel.trec.txt").write_text("".join(judgements), encoding="utf-8")


def write_plugins(folder: Path) -> None:
    """The files of docs/plugins.md, each under the name in its first line."""
    for program in blocks_of((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"), "python"):
        name = program.partition("\n")[0].removeprefix("# ")
        if name.endswith(".py"):
            (folder / name).write_text(program, encoding="utf-8")


def write_run(folder: Path) -> None:
    """A finished run of two steps; its model reads as much as the defaults ask for."""
    words = tokenizer()
    model = new_model(
        "qwen2", vocab_size=len(words), layers=2, width=32, heads=2, ffn=64, max_length=8192,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    save_model(model, words, folder / "made" / "model")
    write_corpus(folder / "made" / "corpus.jsonl", PASSAGES)
    for split, count in {"train": 8, "val": 6, "test": 4}.items():
        write_questions(folder / "made" / f"{split}.parquet", questions(split, count))
    train(config(folder / "made"), folder / "srl-workspace")


def write_models(folder: Path) -> None:
    """Language models, encoders and a cross-encoder, all of random weights."""
    pieces = byte_level_tokenizer()
    model = tiny_model(max_length=8192)
    for name in ("my-model", "Qwen2.5-0.5B", "Qwen2.5-7B"):
        save_model(model, pieces, folder / name)
    shape = {
        "vocab_size": len(pieces), "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "max_position_embeddings": 512, "pad_token_id": 1,
    }  # fmt: skip
    encoder = folder / "intfloat" / "e5-base-v2"
    BertModel(BertConfig(**shape)).save_pretrained(encoder)
    pieces.save_pretrained(encoder)
    shutil.copytree(encoder, folder / "e5-base-v2")
    ranker = folder / "cross-encoder" / "ms-marco-MiniLM-L12-v2"
    BertForSequenceClassification(BertConfig(**shape, num_labels=1)).save_pretrained(ranker)
    pieces.save_pretrained(ranker)
