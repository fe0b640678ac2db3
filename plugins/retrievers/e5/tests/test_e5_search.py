"""Exact search is exact whatever computes it, and ties keep the order of the corpus."""

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srl_e5.exact import TorchSearch, upload
from srl_e5.options import Options
from srl_e5.search import ExactSearch, vector_search

CPU = torch.device("cpu")


def random_vectors(rows: int, width: int = 16, seed: int = 0) -> np.ndarray:
    """(rows, width) float32 of length 1."""
    drawn = np.random.default_rng(seed).standard_normal((rows, width), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def flat(vectors: np.ndarray) -> faiss.IndexFlatIP:
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    return index


def ranked(vectors: np.ndarray, queries: np.ndarray, k: int) -> np.ndarray:
    """The rows of the k best by numpy, in double precision, ties by row."""
    return np.argsort(-(queries.astype(np.float64) @ vectors.T.astype(np.float64)), kind="stable")[:, :k]


@pytest.mark.parametrize("queries", [1, 3, 50])
@pytest.mark.parametrize("k", [1, 10, 300, 999])
def test_flat_search_is_numpys_sort(queries, k):
    vectors, asked = random_vectors(300), random_vectors(queries, seed=1)
    scores, rows = vector_search(flat(vectors), Options(), CPU).search(asked, k)
    assert (rows == ranked(vectors, asked, k)).all()
    assert scores == pytest.approx(np.take_along_axis(asked @ vectors.T, rows, 1), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(
    copies=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    queries=st.integers(1, 40),
    k=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_equal_vectors_score_equally_and_keep_their_order(copies, queries, k, seed):
    vectors, asked = random_vectors(5, seed=seed)[copies], random_vectors(queries, seed=seed + 10)
    scores, rows = vector_search(flat(vectors), Options(), CPU).search(asked, k)
    for found, places in zip(scores.tolist(), rows.tolist(), strict=True):
        assert len(set(found)) == len({copies[place] for place in places})
        keys = [(-score, place) for score, place in zip(found, places, strict=True)]
        assert keys == sorted(keys)
        last = copies[places[-1]]
        assert [place for place in places if copies[place] == last] == [
            place for place, copy in enumerate(copies) if copy == last
        ][: sum(copies[place] == last for place in places)]


def test_a_batch_and_its_queries_alone_agree_to_the_bit():
    vectors, asked = random_vectors(2000, 64), random_vectors(64, 64, seed=1)
    search = vector_search(flat(vectors), Options(), CPU).search
    scores, rows = search(asked, 10)
    alone = [search(asked[row : row + 1], 10) for row in range(64)]
    assert (rows == np.concatenate([found[1] for found in alone])).all()
    assert (scores == np.concatenate([found[0] for found in alone])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_vectors_rounded_to_half_find_what_exact_ones_find(dtype):
    vectors, asked = random_vectors(5000, 32), random_vectors(20, 32, seed=1)
    rough = TorchSearch(upload(vectors, CPU, dtype, rows=999), chunk=700).search
    slack = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}[dtype]
    scores, rows = ExactSearch(flat(vectors), rough, slack).search(asked, 10)
    expected = vector_search(flat(vectors), Options(), CPU).search(asked, 10)
    assert (rows == expected[1]).all()
    assert (scores == expected[0]).all()


@pytest.mark.parametrize(
    ("spec", "inside"),
    [("PCA8,HNSW8", ["index"]), ("IVF40_HNSW8,Flat", ["quantizer"]), ("HNSW8,RFlat", ["base_index"])],
)
def test_ef_search_is_that_of_hnsw_wherever_it_is(spec, inside):
    outer = inner = faiss.index_factory(16, spec, faiss.METRIC_INNER_PRODUCT)
    vector_search(outer, Options(index=spec, ef_search=77), CPU)
    for name in inside:
        inner = faiss.downcast_index(getattr(inner, name))
    assert inner.hnsw.efSearch == 77
