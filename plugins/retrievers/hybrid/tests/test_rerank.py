"""A cross-encoder over any retriever: the right pairs, the right order, whatever shares the batch."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid_parts import PASSAGES, TEXTS, cross_encoder, tokenizer
from transformers import BertForSequenceClassification

from srl.errors import UserError
from srl.index import build_index, open_index
from srl.testing import check_retriever
from srl.trajectory import Passage
from srl_hybrid.cross_encoder import CrossEncoder
from srl_hybrid.rerank import text_of

QUERIES = ["the lighthouse of Genoa", "radium in the dark", "a volcano", "zzz", ""]
PAIRS = [(query, text_of(passage)) for query in QUERIES for passage in PASSAGES]


@pytest.fixture
def options(model: Path) -> dict:
    return {"model": str(model), "max_length": 64, "device": "cpu"}


def ids(hits):
    return [hit.passage.id for hit in hits]


def alone(directory: Path, pairs: list[tuple[str, str]]) -> list[float]:
    """The sigmoid of each pair's logit, one forward pass a pair, nothing padded."""
    model = BertForSequenceClassification.from_pretrained(directory).eval()
    scores = []
    for query, text in pairs:
        with torch.no_grad():
            logits = model(**tokenizer()(query, text, return_tensors="pt")).logits[0].double()
        scores.append(torch.sigmoid(logits[-1] - (logits[0] if len(logits) == 2 else 0)).item())
    return scores


def test_conforms_to_the_retriever_seam(options):
    check_retriever("rerank", options)


@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_each_pair_alone(tmp_path, labels, monkeypatch):
    directory = cross_encoder(tmp_path / "model", labels)
    expected = alone(directory, PAIRS)
    assert np.ptp(expected) > 0.05
    for batch_size, window in ((1, 64), (4, 2), (100, 64)):  # a window is what is tokenized at a time
        monkeypatch.setattr("srl_hybrid.cross_encoder._WINDOW", window)
        encoder = CrossEncoder(str(directory), max_length=64, device="cpu", batch_size=batch_size)
        assert encoder.scores(PAIRS) == pytest.approx(expected, rel=1e-5)
        assert encoder.scores(PAIRS[::-1]) == pytest.approx(expected[::-1], rel=1e-5)
    scores = encoder.scores([PAIRS[0], *PAIRS[1:], PAIRS[0]])
    assert scores[0] == scores[-1]


def test_every_query_meets_its_own_candidates_and_no_others(options, tmp_path, monkeypatch):
    build_index(PASSAGES, tmp_path / "plain")
    build_index(PASSAGES, tmp_path / "one", "rerank", options)
    index = open_index(tmp_path / "one")
    scored: list[tuple[str, str]] = []
    scores = CrossEncoder.scores
    monkeypatch.setattr(
        CrossEncoder, "scores", lambda self, pairs: scored.extend(pairs) or scores(self, pairs)
    )
    together = index.search(QUERIES, 5)
    candidates = dict(zip(QUERIES, open_index(tmp_path / "plain").search(QUERIES, 5), strict=True))
    assert scored == [(query, text_of(hit.passage)) for query in QUERIES for hit in candidates[query]]
    for query, hits in zip(QUERIES, together, strict=True):
        assert sorted(ids(hits)) == sorted(ids(candidates[query]))
        (single,) = index.search([query], 5)
        assert ids(hits) == ids(single)
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in single])


def test_the_order_is_the_cross_encoders_and_equal_scores_keep_that_of_the_corpus(options, model, tmp_path):
    twins = [Passage(name, TEXTS["genoa"]) for name in "bca"]
    build_index([*PASSAGES, *twins], tmp_path / "one", "rerank", options)
    query = "the lighthouse of Genoa in the dark"
    (hits,) = open_index(tmp_path / "one").search([query], 8)
    texts = {**TEXTS, **dict.fromkeys("bca", TEXTS["genoa"])}
    exact = dict(
        zip(
            texts, alone(model, [(query, text_of(Passage("", text))) for text in texts.values()]), strict=True
        )
    )
    assert len(hits) >= 6
    assert ids(hits) == sorted(ids(hits), key=lambda name: (-exact[name], list(texts).index(name)))
    assert [hit.score for hit in hits] == pytest.approx([exact[name] for name in ids(hits)], rel=1e-5)


def test_weights_are_part_of_an_index_and_their_place_is_not(options, tmp_path):
    mine = shutil.copytree(options["model"], tmp_path / "mine")
    manifest = build_index(
        PASSAGES, tmp_path / "one", "rerank", {**options, "model": str(mine), "batch_size": 2}
    )
    assert manifest.digest == build_index(PASSAGES, tmp_path / "two", "rerank", options).digest
    assert not {"model", "device", "batch_size", "runtime"} & set(manifest.options)
    before = open_index(tmp_path / "one").search(QUERIES, 3)
    moved = mine.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="mine"):
        open_index(tmp_path / "one")
    assert open_index(tmp_path / "one", {"model": str(moved)}).search(QUERIES, 3) == before
    shutil.rmtree(moved)
    cross_encoder(moved, seed=1)
    with pytest.raises(UserError, match="cross-encoder"):
        open_index(tmp_path / "one", {"model": str(moved)})
