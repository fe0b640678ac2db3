"""BM25 against numbers worked out by hand; the formula is in test_bm25_formula."""

import pytest

from srl.testing import check_retriever
from srl.trajectory import Passage
from srl_bm25 import retriever
from srl_bm25.options import Options
from srl_bm25.retriever import BM25Retriever

PLAIN = Options(stopwords="none", stemmer="none")
THREE = ["red red fox", "red dog", "blue whale sings loud song"]


def test_scores_are_those_worked_out_by_hand(tmp_path):
    passages = [Passage(f"p{row}", text) for row, text in enumerate(THREE)]
    BM25Retriever(PLAIN).build(iter(passages), tmp_path, lambda done: None)
    # mean length 10/3; idf(red) = ln 1.6, idf(fox) = ln(8/3)
    # p0: 0.470004·2/(2 + 0.9·0.96) + 0.980829/(1 + 0.9·0.96);  p1: 0.470004/(1 + 0.9·0.84)
    (hits,) = BM25Retriever(PLAIN).open(tmp_path).search(["red fox"], 10)
    assert [hit.passage.id for hit in hits] == ["p0", "p1"]
    assert [hit.score for hit in hits] == pytest.approx([0.854411, 0.267656], abs=1e-5)


def test_conforms_to_the_retriever_seam():
    check_retriever("bm25")


def test_a_corpus_past_memory_is_said_before_it_is_built(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(retriever, "free_memory", lambda: 10)
    BM25Retriever().build([Passage("a", "red fox")], tmp_path, lambda done: None)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
