"""Texts become vectors as the model's family wants it, and the vectors are those of transformers itself."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.testing import check_retriever
from srl_e5.encoder import Encoder
from srl_e5.model_settings import Settings, resolve
from srl_e5.options import Options

PLAIN = Settings("", "", "mean", True)
TEXTS = ["red fox", "", "the lighthouse of Genoa was built by who near the sea far far far", "whale"]


def states(directory: Path, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Token vectors (T, D) and the pooler's output (D,) of one text, without batch and padding."""
    from transformers import AutoModel, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(str(directory))(text, return_tensors="pt")
    with torch.no_grad():
        output = AutoModel.from_pretrained(str(directory)).eval()(**tokens)
    return output.last_hidden_state[0].numpy(), output.pooler_output[0].numpy()


def settings_of(directory: Path, **options: object) -> Settings:
    return resolve(directory, Options(model=str(directory), **options))


@pytest.mark.parametrize("index", ["Flat", "HNSW16", "SQfp16"])
def test_conforms_to_the_retriever_seam(encoder, index):
    check_retriever("e5", {"model": str(encoder), "index": index})


@pytest.mark.parametrize("pooling", ["mean", "cls", "pooler"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_is_that_worked_out_from_the_token_vectors(encoder, pooling, normalize):
    ours = Encoder(encoder, Settings("", "", pooling, normalize)).passages(TEXTS)
    for text, vector in zip(TEXTS, ours, strict=True):
        hidden, pooled = states(encoder, text)
        expected = {"mean": hidden.mean(0), "cls": hidden[0], "pooler": pooled}[pooling]
        if normalize:
            expected = expected / np.linalg.norm(expected)
        assert vector == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "query", "passage", "pooling", "normalize"),
    [
        ("e5-base-v2", "query: ", "passage: ", "mean", True),
        ("multilingual-e5-small", "query: ", "passage: ", "mean", True),
        ("bge-base-en-v1.5", "Represent this sentence for searching relevant passages: ", "", "cls", True),
        ("bge-m3", "", "", "cls", True),
        ("e5/contriever", "", "", "mean", False),
        ("contriever-msmarco", "", "", "mean", False),
        ("all-MiniLM-L6-v2", "", "", "mean", True),
    ],
)
def test_families_have_their_published_settings(encoder, tmp_path, name, query, passage, pooling, normalize):
    shutil.copytree(encoder, tmp_path / name)
    assert settings_of(tmp_path / name) == Settings(query, passage, pooling, normalize)


@pytest.mark.parametrize(
    "place",
    ["my-model", "e5-mistral-7b-instruct", "multilingual-e5-large-instruct", "e5-experiments/my-encoder"],
)
def test_an_unknown_family_has_no_prefix_and_that_is_said(encoder, tmp_path, caplog, place):
    """The folder of a model does not name its family."""
    shutil.copytree(encoder, tmp_path / place)
    assert settings_of(tmp_path / place) == Settings("", "", "mean", True)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize(
    ("config", "query", "passage"),
    [
        ({"prompts": {"query": "Search: ", "document": "Text: "}}, "Search: ", "Text: "),
        ({"prompts": {"query": "Search: ", "passage": "P: "}}, "Search: ", "P: "),
        ({"prompts": {"query": "Search: ", "document": ""}, "default_prompt_name": None}, "Search: ", ""),
        ({"prompts": {"sts": "S: "}, "default_prompt_name": "sts"}, "S: ", "S: "),
        ({"prompts": {"query": "", "document": ""}}, "query: ", "passage: "),
        ({"similarity_fn_name": "cosine"}, "query: ", "passage: "),
    ],
)
def test_the_models_own_prompts_beat_the_family(make_encoder, caplog, config, query, passage):
    directory = make_encoder("own-e5")
    (directory / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert settings_of(directory) == Settings(query, passage, "mean", True)
    assert settings_of(directory, query_prefix="q ").query_prefix == "q "
    assert not caplog.records


def test_the_digest_is_that_of_the_encoder_and_not_of_its_place(encoder, another, corpus, tmp_path):
    copy = shutil.copytree(encoder, tmp_path / "elsewhere" / "tiny-e5")
    first = build_index(corpus, tmp_path / "1", "e5", {"model": str(encoder)})
    same = build_index(corpus, tmp_path / "2", "e5", {"model": str(copy), "query_prefix": "query: "})
    other = build_index(corpus, tmp_path / "3", "e5", {"model": str(another), "query_prefix": "query: "})
    prefixed = build_index(corpus, tmp_path / "4", "e5", {"model": str(encoder), "query_prefix": "q: "})
    assert first.digest == same.digest
    assert len({first.digest, other.digest, prefixed.digest}) == 3


def test_an_index_remembers_its_encoder_and_finds_it_elsewhere(make_encoder, corpus, tmp_path):
    directory = make_encoder("moved-e5")
    build_index(corpus, tmp_path / "index", "e5", {"model": str(directory), "passage_prefix": "p: "})
    before = open_index(tmp_path / "index").search(["red fox"], 3)
    moved = directory.rename(tmp_path / "new-place")
    with pytest.raises(UserError, match="moved-e5"):
        open_index(tmp_path / "index")
    assert open_index(tmp_path / "index", {"model": str(moved)}).search(["red fox"], 3) == before


def test_prefixes_are_put_before_the_text(encoder):
    bare, prefixed = Encoder(encoder, PLAIN), Encoder(encoder, Settings("query: ", "passage: ", "mean", True))
    assert (prefixed.queries(["red fox"]) == bare.queries(["query: red fox"])).all()
    assert (prefixed.passages(["red fox"]) == bare.passages(["passage: red fox"])).all()
    assert not np.allclose(prefixed.passages(["red fox"]), prefixed.queries(["red fox"]), atol=1e-3)
