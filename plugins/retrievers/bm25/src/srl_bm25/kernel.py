"""The inner loop of search, compiled by numba.

MaxScore (Turtle and Flood 1995, Query evaluation: strategies and optimizations) over windows of rows. The
k best rows so far define the minimum score. Terms whose peaks together stay below it cannot bring a row
among the best by themselves. Their postings, which are the long ones, are only read for rows that already
have a score.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

FIRST_WINDOW, WINDOW = 1 << 12, 1 << 16
"""Rows of the first window and of the largest. Windows double, so that the bound gets tight early."""
LOOKUP = 24
"""A binary search costs about as much as reading this many postings sequentially."""
SLACK = 1 - 1e-5
"""The relative difference of float32 sums in different orders is smaller than 1 - SLACK."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled by numba, without the GIL, and cached on disk if a directory is writable."""
    try:
        return njit(function, nogil=True, cache=True)
    except RuntimeError:  # neither the package nor the home directory is writable
        return njit(function, nogil=True)


@compiled
def peaks_of(data: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The largest score of each term in any passage, (terms,) float32."""
    peaks = np.zeros(len(starts) - 1, np.float32)
    for term in range(len(peaks)):
        for posting in range(starts[term], starts[term + 1]):
            peaks[term] = max(peaks[term], data[posting])
    return peaks


@compiled
def _insert(rows: np.ndarray, scores: np.ndarray, row: int, score: float) -> None:
    """Insert `row` into `rows` (k,), sorted by descending `scores` (k,), if its score is high enough."""
    place = len(rows)
    while place > 0 and (score > scores[place - 1] or (score == scores[place - 1] and row < rows[place - 1])):
        if place < len(rows):
            rows[place], scores[place] = rows[place - 1], scores[place - 1]
        place -= 1
    if place < len(rows):
        rows[place], scores[place] = row, score


@compiled
def _first(rows: np.ndarray, low: int, high: int, row: int) -> int:
    """The first index in `low` to `high` (exclusive) with `rows[index] >= row`; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if rows[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def _add(
    data: np.ndarray, rows: np.ndarray, place: int, end: int, base: int, limit: int,
    sums: np.ndarray, window_rows: np.ndarray, count: int,
) -> tuple[int, int]:  # fmt: skip
    """Add the scores of the postings from `place` up to row `limit`; the end, and the number of rows seen."""
    while place < end and rows[place] < limit:
        row = rows[place] - base
        if sums[row] == 0:
            window_rows[count] = row
            count += 1
        sums[row] += data[place]
        place += 1
    return place, count


@compiled
def _look_up(
    data: np.ndarray, rows: np.ndarray, place: int, end: int, base: int, limit: int,
    sums: np.ndarray, candidates: np.ndarray,
) -> int:  # fmt: skip
    """Add the scores of the postings up to row `limit` to rows that have one; the end of the postings."""
    place = _first(rows, place, end, base)
    stop = _first(rows, place, end, limit)
    if len(candidates) * LOOKUP < stop - place:
        for row in candidates:
            there = _first(rows, place, stop, row + base)
            if there < stop and rows[there] == row + base:
                sums[row] += data[there]
    else:
        for posting in range(place, stop):
            if sums[rows[posting] - base] > 0:
                sums[rows[posting] - base] += data[posting]
    return stop


@compiled
def _keep(sums: np.ndarray, window_rows: np.ndarray, least: float) -> int:
    """Move the rows with a score of at least `least` to the front of `window_rows`; their number."""
    count = 0
    for place in range(len(window_rows)):
        row = window_rows[place]
        if sums[row] >= least:
            window_rows[place], window_rows[count] = window_rows[count], row
            count += 1
    return count


@compiled
def _search(
    data: np.ndarray, rows: np.ndarray, starts: np.ndarray, peaks: np.ndarray, passages: int,
    sums: np.ndarray, window_rows: np.ndarray,
    terms: np.ndarray, best_rows: np.ndarray, best_scores: np.ndarray,
) -> None:  # fmt: skip
    """One query: fill `best_rows` and `best_scores` (k,). `terms` are sorted by descending peak."""
    places, ends = starts[terms], starts[terms + 1]
    bounds = np.zeros(len(terms) + 1)  # the maximum that this term and the following ones add to a row
    for term in range(len(terms) - 1, -1, -1):
        bounds[term] = bounds[term + 1] + peaks[terms[term]]
    limit, width = 0, FIRST_WINDOW
    while limit < passages:
        threshold, base, following = best_scores[-1] * SLACK, passages, 0
        while following < len(terms) and bounds[following] >= threshold:
            if places[following] < ends[following]:
                base = min(base, rows[places[following]])
            following += 1
        limit, width = min(base + width, passages), min(2 * width, WINDOW)
        count = 0
        for term in range(following):
            places[term], count = _add(
                data, rows, places[term], ends[term], base, limit, sums, window_rows, count
            )
        candidates = count
        for term in range(following, len(terms)):
            candidates = _keep(sums, window_rows[:candidates], threshold - bounds[term])
            if candidates == 0:
                break
            places[term] = _look_up(
                data, rows, places[term], ends[term], base, limit, sums, window_rows[:candidates]
            )
        for row in window_rows[:candidates]:
            if sums[row] >= best_scores[-1]:
                _insert(best_rows, best_scores, row + base, sums[row])
        for row in window_rows[:count]:
            sums[row] = 0


@compiled
def top_rows(
    data: np.ndarray,  # (postings,) float32: the score of a term in a passage, above 0
    rows: np.ndarray,  # (postings,) int32: that passage, ascending within a term
    starts: np.ndarray,  # (terms + 1,) int64: where each term's postings begin
    peaks: np.ndarray,  # (terms,) float32: the largest score of each term
    passages: int,
    terms: np.ndarray,  # (T,) int64: the terms of all queries, one query after the other
    queries: np.ndarray,  # (Q + 1,) int64: where each query's terms begin
    k: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The `k` best rows of each query (Q, k), -1 if there are fewer, and their scores (Q, k).

    A row's score is the sum over the query's terms, in the order of descending peaks, for every `k`. Equal
    scores are in the order of the rows.
    """
    best_rows = np.full((len(queries) - 1, k), -1, np.int64)
    best_scores = np.zeros((len(queries) - 1, k), np.float32)
    sums, window_rows = np.zeros(WINDOW, np.float32), np.empty(WINDOW, np.int32)
    for q in range(len(queries) - 1):
        query = terms[queries[q] : queries[q + 1]]
        query = query[np.argsort(-peaks[query], kind="mergesort")]
        _search(data, rows, starts, peaks, passages, sums, window_rows, query, best_rows[q], best_scores[q])
    return best_rows, best_scores
