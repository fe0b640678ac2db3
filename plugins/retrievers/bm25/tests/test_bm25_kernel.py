"""The search that skips postings finds what adding up all of them finds."""

import numpy as np
import pytest

from srl_bm25.kernel import FIRST_WINDOW, WINDOW, peaks_of, top_rows

ROWS = 3 * WINDOW + 17
TERMS = 40


def postings(seed: int, rows: int = ROWS, levels: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random lists, from a handful of rows to most of them, rare terms scoring higher; with `levels`, few
    different scores, so that there are many ties."""
    draw = np.random.default_rng(seed)
    lists, scores = [], []
    for term in range(TERMS):
        share = 0.6 ** (TERMS - 1 - term) if term % 2 else 2.0 / rows
        found = np.flatnonzero(draw.random(rows) < share)
        lists.append(found)
        score = draw.random(len(found)) * -np.log(share + 1e-6) + 0.01
        scores.append(np.ceil(score * levels) / levels if levels else score)
    starts = np.cumsum([0, *map(len, lists)])
    return np.concatenate(scores).astype(np.float32), np.concatenate(lists).astype(np.int32), starts


def expected(data, rows, starts, terms, size, k):
    """All postings of the query added up in float32, in the order of falling peaks."""
    peaks = peaks_of(data, starts)
    sums = np.zeros(size, np.float32)
    for term in sorted(terms, key=lambda term: -peaks[term]):
        sums[rows[starts[term] : starts[term + 1]]] += data[starts[term] : starts[term + 1]]
    best = np.lexsort((np.arange(size), -sums))[:k]
    best = best[sums[best] > 0]
    return best, sums[best]


def found(data, rows, starts, queries, size, k):
    terms = np.array([term for query in queries for term in query], np.int64)
    bounds = np.cumsum([0, *map(len, queries)])
    return top_rows(data, rows, starts, peaks_of(data, starts), size, terms, bounds, k)


@pytest.mark.parametrize("levels", [0, 2])
@pytest.mark.parametrize("k", [1, 3, 100])
@pytest.mark.parametrize("seed", range(3))
def test_skipping_changes_neither_rows_nor_scores(seed, k, levels):
    index = postings(seed, levels=levels)
    draw = np.random.default_rng(seed + 100)
    queries = [draw.integers(0, TERMS, size).tolist() for size in (1, 2, 3, 5, 8, 13, 0, 30)]
    rows, scores = found(*index, queries, ROWS, k)
    for query, best, score in zip(queries, rows, scores, strict=True):
        right, sums = expected(*index, query, ROWS, k)
        assert best[best >= 0].tolist() == right.tolist()
        np.testing.assert_array_equal(score[: len(sums)], sums)
        assert not score[len(sums) :].any()


@pytest.mark.parametrize("size", [1, FIRST_WINDOW - 1, FIRST_WINDOW, FIRST_WINDOW + 1, 3 * FIRST_WINDOW])
def test_the_last_row_of_a_window_counts(size):
    index = postings(7, size)
    rows, scores = found(*index, [[39, 37, 35]], size, 1000)
    right, sums = expected(*index, [39, 37, 35], size, 1000)
    assert rows[0][rows[0] >= 0].tolist() == right.tolist()
    np.testing.assert_array_equal(scores[0][: len(sums)], sums)


def test_a_query_leaves_nothing_behind_for_the_next():
    index = postings(3)
    query = [39, 38, 37, 0, 2]
    rows, scores = found(*index, [query] * 3, ROWS, 10)
    assert (rows == rows[0]).all()
    assert (scores == scores[0]).all()


def test_peaks_are_the_largest_scores():
    data = np.array([1.0, 3.0, 2.0, 5.0], np.float32)
    assert peaks_of(data, np.array([0, 3, 3, 4])).tolist() == [3.0, 0.0, 5.0]
