"""Texts become vectors as the model's family wants it, and the vectors are those of transformers itself."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from srl.errors import UserError
from srl.index import Fault, build_index, open_index
from srl.index.timing import collect_timings
from srl.testing import check_retriever
from srl_e5.encoder import Encoder, pool
from srl_e5.model_settings import Settings, encoder_digest, model_directory, resolve
from srl_e5.options import Options
from srl_e5.retriever import DenseRetriever

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


def test_mean_pooling_leaves_padding_out():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]]])
    mask = torch.tensor([[True, True, False]])
    output = type("Output", (), {"last_hidden_state": hidden})()
    assert pool(output, mask, "mean").tolist() == [[2.0, 4.0]]
    assert pool(output, mask, "cls").tolist() == [[1.0, 2.0]]


def test_vectors_hardly_depend_on_what_else_is_encoded(encoder):
    alone = np.concatenate([Encoder(encoder, PLAIN).queries([text]) for text in TEXTS])
    for size in (1, 2, 64):
        assert Encoder(encoder, PLAIN, batch_size=size).queries(TEXTS) == pytest.approx(alone, abs=2e-6)


def test_prefixes_are_put_before_the_text(encoder):
    bare, prefixed = Encoder(encoder, PLAIN), Encoder(encoder, Settings("query: ", "passage: ", "mean", True))
    assert (prefixed.queries(["red fox"]) == bare.queries(["query: red fox"])).all()
    assert (prefixed.passages(["red fox"]) == bare.passages(["passage: red fox"])).all()
    assert not np.allclose(prefixed.passages(["red fox"]), prefixed.queries(["red fox"]), atol=1e-3)


def test_what_is_longer_than_the_maximum_is_cut(encoder):
    cut = Encoder(encoder, PLAIN, query_max_length=8)
    assert (cut.queries(["red " * 6]) == cut.queries(["red " * 50])).all()
    assert not np.allclose(cut.passages(["red " * 6 + "fox " * 50]), cut.passages(["red " * 6]), atol=1e-3)


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


def test_explicit_settings_beat_the_family_and_the_models_files(make_encoder, caplog):
    directory = make_encoder("e5-own")
    (directory / "1_Pooling").mkdir()
    switched = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(switched))
    assert settings_of(directory).pooling == "cls"
    given = {"query_prefix": "", "passage_prefix": "p ", "pooling": "mean", "normalize": False}
    assert settings_of(directory, **given) == Settings("", "p ", "mean", False)
    assert not caplog.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]'),
        ("1_Pooling/config.json", '{"pooling_mode_lasttoken": true}'),
        ("1_Pooling/config.json", '{"pooling_mode": "lasttoken"}'),
        ("1_Pooling/config.json", "{"),
    ],
)
def test_layers_after_the_pooling_and_another_pooling_are_refused(make_encoder, file, content):
    directory = make_encoder("some-model")
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text(content)
    with pytest.raises(UserError):
        settings_of(directory)


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


def test_an_index_refuses_another_encoder(encoder, another, corpus, tmp_path):
    build_index(corpus, tmp_path / "index", "e5", {"model": str(encoder)})
    for change in ({"model": str(another)}, {"query_prefix": "q: "}):
        with pytest.raises(UserError, match="another"):
            open_index(tmp_path / "index", change)


def test_a_change_of_the_tokenizer_changes_the_digest(make_encoder):
    directory = make_encoder("some-e5")
    before = encoder_digest(directory)
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("[CLS]", "[SEP]"))
    assert encoder_digest(directory) != before


def test_an_architecture_that_names_its_width_otherwise_is_an_encoder_too(make_encoder, corpus, tmp_path):
    from transformers import DistilBertConfig, DistilBertModel

    directory = make_encoder("distil-minilm")
    shape = {"dim": 24, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, "vocab_size": 600}
    DistilBertModel(DistilBertConfig(**shape)).save_pretrained(directory)
    build_index(corpus, tmp_path / "index", "e5", {"model": str(directory)})
    assert len(open_index(tmp_path / "index").search(["red fox"], 3)[0]) == 3


def test_an_encoder_with_a_decoder_is_refused(make_encoder):
    from transformers import T5Config, T5Model

    directory = make_encoder("t5")
    shape = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 600}
    T5Model(T5Config(**shape)).save_pretrained(directory)
    with pytest.raises(UserError):
        Encoder(directory, PLAIN)


def test_ten_megabytes_are_looked_at_no_further_than_there_is_room(encoder, monkeypatch):
    lengths: list[int] = []
    monkeypatch.setattr("srl_e5.encoder._clean", lambda text: lengths.append(len(text)) or text[:9])
    Encoder(encoder, PLAIN).queries(["word " * 2_000_000])
    assert lengths == [256_000]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_comes_near(encoder, dtype):
    exact = Encoder(encoder, PLAIN).passages(TEXTS)
    assert Encoder(encoder, PLAIN, dtype=dtype).passages(TEXTS) == pytest.approx(exact, abs=2e-2)


def test_time_is_told_as_embedding_and_search(encoder, corpus, tmp_path):
    build_index(corpus, tmp_path / "index", "e5", {"model": str(encoder)})
    index = open_index(tmp_path / "index")
    with collect_timings() as seconds:
        index.search(["red fox"], 3)
    assert set(seconds) == {"embed", "search"}
    assert all(value > 0 for value in seconds.values())


def test_a_vector_that_is_not_finite_is_a_failure_and_no_ranking(encoder, corpus, tmp_path, monkeypatch):
    build_index(corpus, tmp_path / "index", "e5", {"model": str(encoder)})
    index = open_index(tmp_path / "index")
    monkeypatch.setattr(Encoder, "_vectors", lambda self, ids: np.full((len(ids), 32), np.nan, np.float32))
    (outcome,) = index.outcomes(["red fox"], 3)
    assert isinstance(outcome, Fault)


def without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def cut_weights(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def own_code(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config |= {"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("harm", [shutil.rmtree, without_weights, cut_weights, own_code])
def test_a_model_that_is_missing_damaged_or_brings_code_is_one_line_before_anything_is_built(
    make_encoder: Callable[..., Path], tmp_path, harm
):
    directory = make_encoder("harmed-e5")
    harm(directory)
    with pytest.raises(UserError, match="harmed-e5") as caught:
        build_index(iter([]), tmp_path / "index", "e5", {"model": str(directory)})
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "index").exists()


def test_a_name_on_the_hub_is_fetched_without_formats_that_run_code(encoder, monkeypatch, tmp_path):
    patterns: list[str] = []

    def fetched(name: str, allow_patterns: list[str], **_: object) -> str:
        patterns.extend(allow_patterns)
        return str(encoder)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="nobody/nothing-e5"):
        model_directory("nobody/nothing-e5")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert model_directory("intfloat/e5-base-v2") == encoder
    assert patterns
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in patterns)


def test_a_pooler_without_weights_and_too_many_tokens_are_refused(encoder, another):
    Encoder(another, PLAIN)
    with pytest.raises(UserError):
        Encoder(another, Settings("", "", "pooler", True))
    with pytest.raises(UserError) as caught:
        Encoder(encoder, PLAIN, query_max_length=257)
    assert caught.value.key == "retriever.e5.query_max_length"


def test_without_faiss_one_line_says_what_to_install(encoder, corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(UserError, match="faiss"):
        DenseRetriever(Options(model=str(encoder))).build(corpus, tmp_path, lambda done: None)
