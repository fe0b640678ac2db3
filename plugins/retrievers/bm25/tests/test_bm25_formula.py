"""Scores against the formula in double precision, and against those of bm25s itself.

The formula is that of Robertson and Zaragoza (2009, equation 3.15) with Lucene's idf and without the
factor k1 + 1, as in Kamphuis et al. (2020).
"""

import math
import random
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import bm25s
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from srl.trajectory import Passage
from srl_bm25.analysis import Analyzer
from srl_bm25.options import Options
from srl_bm25.retriever import BM25Retriever

Document = list[str]


def exact(documents: list[Document], query: Document, k1: float, b: float) -> list[float]:
    """The score of every document; a term that is asked twice counts twice."""
    counts = [Counter(document) for document in documents]
    mean = math.fsum(map(len, documents)) / len(documents)
    having = Counter(term for count in counts for term in count)
    scores = []
    for document, count in zip(documents, counts, strict=True):
        norm = k1 * (1 - b + b * len(document) / mean)
        terms = [
            math.log1p((len(documents) - having[term] + 0.5) / (having[term] + 0.5))
            * count[term]
            / (count[term] + norm)
            for term in query
            if count[term]
        ]
        scores.append(math.fsum(terms))
    return scores


def found(texts: list[str], queries: list[str], k: int, options: Options) -> list[list[tuple[int, float]]]:
    """Row and score of each hit."""
    with TemporaryDirectory() as folder:
        passages = [Passage(str(row), text) for row, text in enumerate(texts)]
        BM25Retriever(options).build(passages, Path(folder), lambda done: None)
        answers = BM25Retriever(options).open(Path(folder)).search(queries, k)
    return [[(int(hit.passage.id), hit.score) for hit in hits] for hits in answers]


def assert_formula(texts: list[str], queries: list[str], k: int, options: Options) -> None:
    """Every hit has its score, and the hits are the k best, to 1e-5 or the rounding of a sum in float32.

    Each of n scores of terms and each of their additions is rounded by at most 2⁻²⁴ of the sum so far.
    """
    analyze = Analyzer(options.stopwords, options.stemmer)
    documents = [analyze(text) for text in texts]
    for query, hits in zip(queries, found(texts, queries, k, options), strict=True):
        scores = exact(documents, analyze(query), options.k1, options.b)
        best = sorted((score for score in scores if score > 0), reverse=True)[:k]
        rounding = max(1e-5, (len(analyze(query)) + 1) * 2**-24 * max(scores))
        assert [score for _, score in hits] == pytest.approx([scores[row] for row, _ in hits], abs=rounding)
        assert [score for _, score in hits] == pytest.approx(best, abs=rounding)


word = st.sampled_from(["king", "kings", "river", "the", "of", "castle", "東京", "tower", "1066", "rare"])
text = st.lists(word, min_size=1, max_size=90).map(" ".join)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(text, min_size=1, max_size=25),
    queries=st.lists(text, min_size=1, max_size=3),
    k=st.integers(1, 30),
    k1=st.floats(0, 3),
    b=st.floats(0, 1),
)
@example(texts=["king"] * 20 + ["king river"], queries=["king " * 60 + "river " * 5], k=1, k1=0.0, b=0.0)
def test_scores_are_the_formulas_with_exact_lengths(texts, queries, k, k1, b):
    options = Options(k1=k1, b=b, stopwords="none")
    assert_formula(["king", *texts], queries, k, options)


@pytest.mark.parametrize(("k", "k1", "b"), [(1, 0.9, 0.4), (3, 1.2, 0.75), (100, 0.9, 1)])
def test_best_of_many_passages_are_the_formulas(k, k1, b):
    chance = random.Random(0)
    names = [f"w{n}" for n in range(3000)]
    frequency = [1 / (n + 1) for n in range(3000)]  # Zipf's law
    texts = [" ".join(chance.choices(names, frequency, k=chance.randint(5, 300))) for _ in range(800)]
    queries = [" ".join(chance.choices(names, frequency, k=chance.randint(1, 12))) for _ in range(25)]
    assert_formula(texts, queries, k, Options(k1=k1, b=b, stemmer="none", stopwords="none"))


def test_scores_are_those_of_bm25s():
    chance = random.Random(1)
    names = [f"w{n}" for n in range(50)]
    documents = [chance.choices(names, k=chance.randint(1, 200)) for _ in range(100)]
    reference = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    reference.index(documents, show_progress=False)
    texts = [" ".join(document) for document in documents]
    query = ["w1", "w7", "w7", "w30"]
    (hits,) = found(texts, [" ".join(query)], 100, Options(stemmer="none", stopwords="none"))
    theirs = reference.get_scores(query)
    assert [score for _, score in hits] == pytest.approx([float(theirs[row]) for row, _ in hits], abs=1e-5)
    assert len(hits) == int((theirs > 0).sum())


def test_without_b_lengths_do_not_matter():
    texts = ["king", "king " + "river " * 200]
    ((_, one), (_, other)), *_ = found(texts, ["king"], 2, Options(b=0))
    assert one == other


def test_without_k1_only_idf_matters():
    texts = ["king king king", "king river", "river"]
    ((_, one), (_, other)), *_ = found(texts, ["king"], 3, Options(k1=0))
    assert one == other == pytest.approx(math.log(1 + 1.5 / 2.5), abs=1e-6)


def test_larger_b_marks_long_passages_down_further():
    texts = ["king " + "river " * 50, "king", "sea " * 30]
    lows = [dict(found(texts, ["king"], 2, Options(b=b))[0])[0] for b in (0, 0.4, 1)]
    assert lows == sorted(lows, reverse=True)
    assert len(set(lows)) == 3
