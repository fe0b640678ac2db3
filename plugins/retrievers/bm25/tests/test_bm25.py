"""BM25 against numbers worked out by hand and against the formula written out in Python."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.errors import UserError
from srl.index import keep_passages
from srl.testing import check_retriever
from srl.trajectory import Passage
from srl_bm25 import retriever
from srl_bm25.analysis import Analyzer, words
from srl_bm25.options import Options
from srl_bm25.retriever import BM25Retriever, free_memory, too_large

PLAIN = Options(stopwords="none", stemmer="none")
THREE = ["red red fox", "red dog", "blue whale sings loud song"]


def opened(texts: list[str], directory: Path, options: Options = PLAIN) -> BM25Retriever:
    passages = [Passage(f"p{row}", text) for row, text in enumerate(texts)]
    BM25Retriever(options).build(iter(passages), directory, lambda done: None)
    return BM25Retriever(options).open(directory)


def answers(retriever: BM25Retriever, query: str, k: int = 10) -> list[tuple[str, float]]:
    return [(hit.passage.id, hit.score) for hit in retriever.search([query], k)[0]]


def formula(texts: list[str], query: str, k1: float, b: float) -> list[float]:
    """The score of every text, in double precision, straight from the definition."""
    documents = [Counter(text.split()) for text in texts]
    mean = sum(document.total() for document in documents) / len(documents)
    scores = [0.0] * len(texts)
    for term in query.split():
        n = sum(term in document for document in documents)
        idf = math.log(1 + (len(texts) - n + 0.5) / (n + 0.5))
        for row, document in enumerate(documents):
            if tf := document[term]:
                scores[row] += idf * tf / (tf + k1 * (1 - b + b * document.total() / mean))
    return scores


def test_scores_are_those_worked_out_by_hand(tmp_path):
    retriever = opened(THREE, tmp_path)
    # mean length 10/3; idf(red) = ln 1.6, idf(fox) = ln(8/3)
    # p0: 0.470004·2/(2 + 0.9·0.96) + 0.980829/(1 + 0.9·0.96);  p1: 0.470004/(1 + 0.9·0.84)
    assert answers(retriever, "red fox") == [
        ("p0", pytest.approx(0.854411, abs=1e-5)),
        ("p1", pytest.approx(0.267656, abs=1e-5)),
    ]


def test_lengths_are_exact_and_not_rounded_as_lucene_stores_them(tmp_path):
    texts = [" ".join(["rare"] + ["filler"] * extra) for extra in (100, 101)]
    (first, high), (second, low) = answers(opened(texts, tmp_path), "rare")
    assert (first, second) == ("p0", "p1")
    assert high > low
    assert [high, low] == pytest.approx(formula(texts, "rare", 0.9, 0.4), abs=1e-5)


word = st.sampled_from(["a", "b", "c", "d", "e", "f", "g"])
text = st.lists(word, min_size=1, max_size=8).map(" ".join)


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(text, min_size=1, max_size=12),
    queries=st.lists(text, min_size=1, max_size=4),
    k=st.integers(1, 14),
    k1=st.sampled_from([0.0, 0.9, 1.5]),
    b=st.sampled_from([0.0, 0.4, 1.0]),
)
def test_scores_and_order_are_the_formulas(texts, queries, k, k1, b):
    with TemporaryDirectory() as folder:
        retriever = opened(texts, Path(folder), Options(stopwords="none", stemmer="none", k1=k1, b=b))
        for query, hits in zip(queries, retriever.search(queries, k), strict=True):
            exact = formula(texts, query, k1, b)
            rows = [int(hit.passage.id[1:]) for hit in hits]
            scores = [hit.score for hit in hits]
            assert scores == pytest.approx([exact[row] for row in rows], abs=1e-5)
            assert scores == pytest.approx([s for s in sorted(exact, reverse=True) if s > 0][:k], abs=1e-5)
            assert list(zip(scores, rows, strict=True)) == sorted(
                zip(scores, rows, strict=True), key=lambda pair: (-pair[0], pair[1])
            )


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_equal_scores_keep_the_order_of_the_corpus(tmp_path, k):
    texts = ["red fox", "dog", "fox red", "red fox", "red fox red"]
    found = answers(opened(texts, tmp_path), "fox", k)
    assert [name for name, _ in found] == ["p0", "p2", "p3", "p4"][:k]


def test_a_term_asked_twice_counts_twice(tmp_path):
    retriever = opened(THREE, tmp_path)
    once, twice = answers(retriever, "dog"), answers(retriever, "dog dog")
    assert twice == [("p1", pytest.approx(2 * once[0][1]))]


@pytest.mark.parametrize("query", ["", "  ", "?!", "unicorn", "…", "the"])
def test_query_without_a_known_term_has_no_hits(tmp_path, query):
    assert answers(opened(THREE, tmp_path, Options()), query) == []


def test_a_batch_answers_like_its_queries_alone(tmp_path):
    retriever = opened(THREE, tmp_path)
    queries = ["red", "", "blue song", "red"]
    assert retriever.search(queries, 2) == [retriever.search([query], 2)[0] for query in queries]


def test_threads_change_nothing_but_time(tmp_path):
    one = opened(THREE, tmp_path)
    many = BM25Retriever(PLAIN.model_copy(update={"n_threads": 3})).open(tmp_path)
    queries = ["red", "fox", "dog whale", "zzz", "song"]
    assert many.search(queries, 3) == one.search(queries, 3)


def test_k_may_exceed_the_corpus(tmp_path):
    assert len(answers(opened(THREE, tmp_path), "red", 1000)) == 2


def test_postings_are_mapped_not_read(tmp_path):
    retriever = opened(THREE, tmp_path)
    arrays = *retriever._postings, retriever._vocabulary._hashes, retriever._vocabulary._terms
    assert [isinstance(array, np.memmap) for array in arrays] == [True] * 6


def test_two_builds_are_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        opened(THREE, tmp_path / name)
    files = sorted(path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.*"))
    assert len(files) == 10
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_progress_counts_passages(tmp_path):
    done: list[int] = []
    BM25Retriever().build([Passage(str(row), "word") for row in range(4)], tmp_path, done.append)
    assert done == [1, 2, 3, 4]


def test_corpus_without_a_word_is_refused(tmp_path):
    with pytest.raises(UserError, match="stopwords=none"):
        BM25Retriever().build([Passage("a", "the of?")], tmp_path, lambda done: None)


def test_words_have_no_case_accent_or_possessive():
    assert (
        " ".join(words("Beyoncé’s Straße, the fox's O'Brien 42nd")) == "beyonce strasse the fox o'brien 42nd"
    )


def test_stop_words_go_and_stems_meet():
    assert Analyzer()("The kings were crowned in 1066") == Analyzer()("king were crown 1066")
    assert Analyzer("none", "none")("The kings") == ["the", "kings"]


def test_a_stemmed_index_finds_other_forms_of_a_word(tmp_path):
    texts = ["he died in Rome", "she lives in Rome"]
    stemmed = opened(texts, tmp_path, Options())
    assert [name for name, _ in answers(stemmed, "dies")] == ["p0"]
    assert [name for name, _ in answers(stemmed, "living")] == ["p1"]


@pytest.mark.parametrize(
    "options", [{"k1": -1}, {"b": 1.5}, {"stemmer": "klingon"}, {"n_threads": 0}, {"k3": 1}]
)
def test_options_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError):
        Options(**options)


def test_conforms_to_the_retriever_seam():
    check_retriever("bm25")


def test_a_corpus_past_memory_is_said_before_it_is_built(tmp_path, monkeypatch, caplog):
    store = keep_passages([Passage("a", "red fox")], tmp_path)
    assert too_large(store, free=1000) == ""
    monkeypatch.setattr(retriever, "free_memory", lambda: 10)
    BM25Retriever().build(store, tmp_path, lambda done: None)
    assert "srl index build --retriever lucene" in caplog.text
    assert free_memory() > 0
