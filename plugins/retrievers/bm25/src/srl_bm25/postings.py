"""Builds postings from passages: the passages that contain a term, and its score in each.

bm25s computes the same scores; this module computes them in place, compiled and without copies.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from srl.trajectory import Passage
from srl_bm25.analysis import Analyzer
from srl_bm25.kernel import compiled, peaks_of
from srl_bm25.vocabulary import Vocabulary

NAMES = ("data", "indices", "indptr", "peaks")
"""The arrays that `top_rows` searches, one file each."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Passages as concatenated term numbers."""

    numbers: Mapping[str, int]  # term -> its number, in the order of first occurrence
    terms: np.ndarray  # (tokens,) int32
    starts: np.ndarray  # (passages + 1,) int64: where each passage's terms begin


def read_documents(
    passages: Iterable[Passage], analyze: Analyzer, progress: Callable[[int], None]
) -> Documents:
    """Analyse `passages`; `progress` gets the number analysed so far."""
    numbers: dict[str, int] = {}
    number_of = _Words(analyze, numbers)
    terms, starts = array("i"), array("q", [0])
    for count, passage in enumerate(passages, start=1):
        terms.extend(map(number_of.__getitem__, analyze.words(passage.contents)))
        starts.append(len(terms))
        progress(count)
    bounds = np.frombuffer(starts, np.int64)
    ids = np.frombuffer(terms, np.int32) if terms else np.empty(0, np.int32)
    return Documents(numbers, ids[: without_stop_words(ids, bounds)], bounds)


class _Words(dict[str, int]):
    """A cache of words to the numbers of their terms, -1 for a stop word."""

    def __init__(self, analyze: Analyzer, numbers: dict[str, int]) -> None:
        super().__init__()
        self._analyze, self._numbers = analyze, numbers

    def __missing__(self, word: str) -> int:
        term = self._analyze.term(word)
        self[word] = number = self._numbers.setdefault(term, len(self._numbers)) if term else -1
        return number


def write_postings(documents: Documents, k1: float, b: float, folder: Path) -> None:
    """Write the arrays and the vocabulary of `documents` into `folder`.

    The score of a term in a passage is BM25's (Robertson and Zaragoza 2009) as Lucene defines it, with
    exact lengths:

        idf(t) · tf / (tf + k1 · (1 - b + b · |p| / mean |p|)),  idf(t) = ln(1 + (N - n_t + ½) / (n_t + ½))
    """
    count, lengths = len(documents.starts) - 1, np.diff(documents.starts)
    frequencies = passages_of_terms(documents.terms, documents.starts, len(documents.numbers))
    starts = np.concatenate([[0], np.cumsum(frequencies)])
    data, rows = postings(documents.terms, documents.starts, starts)
    idf = np.log(1 + (count - frequencies + 0.5) / (frequencies + 0.5))
    mean = math.fsum(lengths) / count
    score(data, rows, starts, idf, k1 * (1 - b + b * lengths / mean))
    for name, values in zip(NAMES, (data, rows, starts, peaks_of(data, starts)), strict=True):
        np.save(folder / f"{name}.npy", values)
    Vocabulary.write(documents.numbers, folder)


@compiled
def without_stop_words(terms: np.ndarray, starts: np.ndarray) -> int:
    """Remove stop words (-1) from `terms` and adjust `starts`, in place; the number of terms left."""
    end = 0
    for row in range(len(starts) - 1):
        begin, starts[row] = starts[row], end
        for term in terms[begin : starts[row + 1]]:
            if term >= 0:
                terms[end] = term
                end += 1
    starts[-1] = end
    return end


@compiled
def passages_of_terms(terms: np.ndarray, starts: np.ndarray, size: int) -> np.ndarray:
    """The number of passages that contain each of `size` terms, (size,) int64."""
    frequencies, last = np.zeros(size, np.int64), np.full(size, -1, np.int64)
    for row in range(len(starts) - 1):
        for term in terms[starts[row] : starts[row + 1]]:
            if last[term] != row:
                last[term] = row
                frequencies[term] += 1
    return frequencies


@compiled
def postings(terms: np.ndarray, starts: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The count of each term in each of its passages, (postings,) float32, and these passages, (postings,)
    int32, ascending within a term. The postings of a term begin at its `places`."""
    counts, rows = np.zeros(places[-1], np.float32), np.empty(places[-1], np.int32)
    ends = places[:-1].copy()
    for row in range(len(starts) - 1):
        for term in terms[starts[row] : starts[row + 1]]:
            if ends[term] > places[term] and rows[ends[term] - 1] == row:
                counts[ends[term] - 1] += 1
            else:
                rows[ends[term]], counts[ends[term]] = row, 1
                ends[term] += 1
    return counts, rows


@compiled
def score(
    counts: np.ndarray, rows: np.ndarray, places: np.ndarray, idf: np.ndarray, norms: np.ndarray
) -> None:
    """Turn `counts` into BM25 scores in place; `norms` (passages,) is k1 times the length normalisation."""
    for term in range(len(places) - 1):
        for posting in range(places[term], places[term + 1]):
            counts[posting] = idf[term] * counts[posting] / (counts[posting] + norms[rows[posting]])
