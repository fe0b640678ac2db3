"""The inner loop of search, compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled without the GIL; kept on disk between processes wherever numba finds a place for it."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:  # neither the package nor the home directory can be written
        return njit(function, nogil=True)


@_compiled
def _insert(rows: np.ndarray, scores: np.ndarray, row: int, score: float) -> None:
    """Put `row` into `rows` (k,), which `scores` (k,) keeps in falling order, if it is good enough."""
    place = len(rows)
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and row < rows[place - 1])):
        if place < len(rows):
            rows[place], scores[place] = rows[place - 1], scores[place - 1]
        place -= 1
    if place < len(rows):
        rows[place], scores[place] = row, score


@_compiled
def top_rows(
    data: np.ndarray,  # (postings,) float32: the score that a term gives a passage
    rows: np.ndarray,  # (postings,) int32: that passage
    starts: np.ndarray,  # (terms + 1,) int64: where each term's postings begin
    passages: int,
    terms: np.ndarray,  # (T,) int64: the terms of all queries, one query after the other
    queries: np.ndarray,  # (Q + 1,) int64: where each query's terms begin
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The `k` best rows of each query (Q, k), -1 where there are fewer, and their scores (Q, k).

    A row's score is the sum over the query's terms; equal scores stay in the order of the rows. The
    postings are read twice, to add up and to collect (and clear): passages that share no term are not
    visited, so the work does not grow with the corpus alone.
    """
    best_rows = np.full((len(queries) - 1, k), -1, np.int64)
    best_scores = np.zeros((len(queries) - 1, k), np.float32)
    sums = np.zeros(passages, np.float32)
    for q in range(len(queries) - 1):
        of_query = terms[queries[q] : queries[q + 1]]
        for term in of_query:
            for posting in range(starts[term], starts[term + 1]):
                sums[rows[posting]] += data[posting]
        for term in of_query:
            for posting in range(starts[term], starts[term + 1]):
                row = rows[posting]
                _insert(best_rows[q], best_scores[q], row, sums[row])
                sums[row] = 0.0
    return best_rows, best_scores
