"""Exact search is exact whatever computes it, and ties keep the order of the corpus."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.errors import UserError
from srl.index import build_index, open_index
from srl_e5 import search
from srl_e5.exact import TorchSearch, top_columns, upload
from srl_e5.faiss_index import read_index, vectors_of
from srl_e5.options import Options
from srl_e5.search import ApproximateSearch, ExactSearch, in_order, vector_search

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


def test_candidates_are_asked_for_until_none_can_be_missing():
    vectors = np.repeat(random_vectors(2), 500, axis=0)
    asked: list[int] = []

    def find(queries, k):
        asked.append(k)
        return flat(vectors).search(queries, k)

    _, rows = ExactSearch(flat(vectors), find, 1e-5).search(vectors[-1:], 3)
    assert rows.tolist() == [[500, 501, 502]]
    assert asked == [11, 44, 176, 704]


@pytest.mark.parametrize("chunk", [1, 7, 100, 2000])
@pytest.mark.parametrize("k", [1, 3, 50])
def test_chunks_change_nothing(chunk, k):
    vectors, asked = random_vectors(1500), random_vectors(4, seed=1)
    scores, rows = TorchSearch(torch.from_numpy(vectors), chunk).search(asked, k)
    assert (rows == ranked(vectors, asked, k)).all()
    assert scores == pytest.approx(np.take_along_axis(asked @ vectors.T, rows, 1), abs=1e-6)


@pytest.mark.parametrize("columns", [1, 100, 128 * 40, 128 * 40 + 17])
def test_the_largest_columns_are_those_of_a_full_sort(columns):
    scores = torch.randn(6, columns, generator=torch.Generator().manual_seed(0))
    values, places = top_columns(scores, 5)
    expected = scores.topk(min(5, columns), dim=1)
    assert torch.equal(values, expected.values)
    assert torch.equal(places, expected.indices)


def test_rows_that_were_not_found_come_last_and_are_no_hits(encoder, corpus, tmp_path, monkeypatch):
    scores, rows = in_order(np.array([[0.5, -3e38, 0.9]], np.float32), np.array([[7, -1, 2]]))
    assert rows.tolist() == [[2, 7, -1]]
    assert scores[0, :2].tolist() == pytest.approx([0.9, 0.5])
    build_index(corpus, tmp_path / "index", "e5", {"model": str(encoder), "index": "IVF10,Flat", "nprobe": 1})
    hits = open_index(tmp_path / "index").search(["red fox"], 50)[0]
    assert 0 < len(hits) < 50


def test_an_approximate_search_puts_ties_in_order():
    """Which vectors HNSW finds, and in which last digits their scores differ, depends on the processor."""
    vectors = np.repeat(random_vectors(3), 4, axis=0)
    index = faiss.index_factory(16, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    index.add(vectors)
    search = vector_search(index, Options(index="HNSW8"), CPU)
    assert isinstance(search, ApproximateSearch)
    scores, rows = search.search(vectors[4:5], 3)
    keys = [(-score, row) for score, row in zip(scores[0], rows[0], strict=True)]
    assert keys == sorted(keys)

    tied = ApproximateSearch(index, lambda queries, k: (np.full((1, 4), 0.5), np.array([[6, 4, 7, 5]])))
    assert tied.search(vectors[4:5], 3)[1].tolist() == [[4, 5, 6]]


def test_thoroughness_is_the_options():
    hnsw = faiss.index_factory(16, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    ivf = faiss.index_factory(16, "PCA8,IVF40,Flat", faiss.METRIC_INNER_PRODUCT)
    vector_search(hnsw, Options(ef_search=77), CPU)
    vector_search(ivf, Options(nprobe=9), CPU)
    assert (hnsw.hnsw.efSearch, faiss.extract_index_ivf(ivf).nprobe) == (77, 9)


@pytest.mark.parametrize(
    ("spec", "inside"),
    [
        ("PCA8,HNSW8", ["index"]),
        ("OPQ4,HNSW8_PQ4", ["index"]),
        ("HNSW8,RFlat", ["base_index"]),
        ("IDMap,HNSW8", ["index"]),
        ("IDMap2,HNSW8_SQ8", ["index"]),
        ("PCA8,HNSW8,RFlat", ["base_index", "index"]),
        ("IVF40_HNSW8,Flat", ["quantizer"]),
        ("PCA8,IVF40_HNSW8,PQ4,RFlat", ["base_index", "index", "quantizer"]),
    ],
)
def test_ef_search_is_that_of_hnsw_wherever_it_is(spec, inside):
    outer = inner = faiss.index_factory(16, spec, faiss.METRIC_INNER_PRODUCT)
    vector_search(outer, Options(index=spec, ef_search=77), CPU)
    for name in inside:
        inner = faiss.downcast_index(getattr(inner, name))
    assert inner.hnsw.efSearch == 77


def test_an_index_on_disk_is_mapped_and_searched_where_it_lies(tmp_path):
    vectors = random_vectors(100)
    faiss.write_index(flat(vectors), str(tmp_path / "flat.faiss"))
    index = read_index(tmp_path / "flat.faiss")
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "flat.faiss") in maps
    assert (vectors_of(index) == vectors).all()
    assert (vector_search(index, Options(), CPU).search(vectors[:3], 1)[1][:, 0] == [0, 1, 2]).all()


def test_a_gpu_that_is_not_there_or_does_not_help_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError):
        vector_search(flat(random_vectors(9)), Options(search_on="gpu"), CPU)
    hnsw = faiss.index_factory(16, "HNSW8", faiss.METRIC_INNER_PRODUCT)
    with pytest.raises(UserError):
        vector_search(hnsw, Options(search_on="gpu"), CPU)


def test_an_index_too_large_for_the_gpu_stays_on_the_cpu_unless_it_must(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert not search._fits(flat(random_vectors(9)), Options(), CPU)
    with pytest.raises(UserError):
        search._fits(flat(random_vectors(9)), Options(search_on="gpu"), CPU)


def test_the_number_of_threads_changes_nothing():
    vectors, asked = random_vectors(2000, 64), random_vectors(30, 64, seed=1)
    one, two = (vector_search(flat(vectors), Options(n_threads=n), CPU).search(asked, 10) for n in (1, 2))
    assert (one[0] == two[0]).all()
    assert (one[1] == two[1]).all()


@pytest.mark.parametrize("spec", ["Flat", "HNSW16"])
def test_many_threads_get_what_one_gets(encoder, corpus, tmp_path, spec):
    build_index(corpus, tmp_path / "index", "e5", {"model": str(encoder), "index": spec})
    index = open_index(tmp_path / "index", {"n_threads": 1})
    queries = [[passage.contents for passage in corpus[row : row + 1 + row % 3]] for row in range(16)]
    expected = [index.search(some, 5) for some in queries]
    with ThreadPoolExecutor(4) as pool:
        for found, known in zip(pool.map(lambda some: index.search(some, 5), queries), expected, strict=True):
            assert [[h.passage.id for h in hits] for hits in found] == [
                [h.passage.id for h in hits] for hits in known
            ]
