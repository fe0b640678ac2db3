"""How good rankings are, by the measures of information retrieval, and how far to trust the means.

A ranking is the ids of passages, best first; what is relevant is a grade for each judged passage, and a
passage that nobody judged, or of a grade below 1, is not relevant. The measures are those of `trec_eval`,
computed by `ir_measures`:

    recall@k   the share of a question's relevant passages that are among the first k
    nDCG@10    the gains of the first ten, discounted by rank, over those of the best order there is:
               Σ_i grade_i / log2(i + 1); Järvelin and Kekäläinen (2002), with linear gains
    MRR        1 / the rank of the first relevant passage, 0 where there is none
    MAP        the mean, over a question's relevant passages, of the precision at the rank of each
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from srl.errors import UserError
from srl.evaluate.intervals import Interval, wilson_interval

DEPTHS = (1, 3, 5, 10, 100)
Rankings = Mapping[str, Sequence[str]]
Judged = Mapping[str, Mapping[str, int]]

_SAMPLES = 2000
_BATCH = 1 << 22
"""Values of resampled questions that are held at a time."""


@dataclass(frozen=True, slots=True)
class Figure:
    """The mean of a measure over questions, and its interval; no interval where there is one question."""

    mean: float
    low: float
    high: float


def ranking_measures(
    rankings: Rankings, judged: Judged, depths: Sequence[int] = DEPTHS
) -> dict[str, dict[str, float]]:
    """`{measure: {question: value}}` for every question that has a relevant passage.

    A question without a ranking has found nothing: all its values are 0. A passage that a ranking has twice
    counts where it comes first. Raises UserError where the library is not installed.
    """
    library = imported("ir_measures")
    names = {library.R @ depth: f"recall@{depth}" for depth in depths}
    names |= {library.nDCG @ 10: "nDCG@10", library.RR: "MRR", library.AP: "MAP"}
    asked = [question for question in judged if relevant_of(judged[question])]
    values = {name: dict.fromkeys(asked, 0.0) for name in names.values()}
    grades = {question: dict(judged[question]) for question in asked}
    run = {question: _scores(rankings.get(question, ())) for question in asked}
    for found in library.iter_calc(list(names), grades, run):
        values[names[found.measure]][found.query_id] = float(found.value)
    return values


def answer_measures(
    ranks: Mapping[str, int | None], depths: Sequence[int] = DEPTHS
) -> dict[str, dict[str, float]]:
    """The same for questions of which only the answer is known; `ranks` is that of the first passage with it.

    `answer recall@k` is 1 where one of the first k holds an accepted answer (the top-k accuracy of Karpukhin
    et al., 2020), `answer MRR` 1 / its rank. Such a passage need not be about the question at all.
    """
    measures = {
        f"answer recall@{depth}": {
            name: float(rank is not None and rank <= depth) for name, rank in ranks.items()
        }
        for depth in depths
    }
    measures["answer MRR"] = {name: 1 / rank if rank else 0.0 for name, rank in ranks.items()}
    return measures


def relevant_of(grades: Mapping[str, int]) -> list[str]:
    """The passages that are relevant: those of grade 1 and above."""
    return [passage for passage, grade in grades.items() if grade >= 1]


def figure(values: Sequence[float], confidence: float = 0.95) -> Figure:
    """The mean over questions, with Wilson's interval where all values are 0 or 1, else the bootstrap's."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Figure(mean, float("nan"), float("nan"))
    if set(values) <= {0.0, 1.0}:
        return Figure(mean, *wilson_interval(mean, len(values), confidence))
    return Figure(mean, *bootstrap_interval(values, confidence))


def bootstrap_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The percentile interval of the mean, questions drawn anew 2,000 times; the same in every run."""
    result = imported("scipy.stats").bootstrap(
        (np.asarray(values, float),),
        np.mean,
        axis=-1,
        n_resamples=_SAMPLES,
        batch=max(_BATCH // len(values), 1),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return Interval(*map(float, result.confidence_interval))


def _scores(ranking: Sequence[str]) -> dict[str, float]:
    """Scores that fall from rank to rank: `trec_eval` sorts by score and breaks ties by id."""
    scores: dict[str, float] = {}
    for position, passage in enumerate(ranking):
        scores.setdefault(passage, float(len(ranking) - position))
    return scores


def imported(name: str) -> Any:
    """A library of the extra `ir`. Raises UserError where it is not installed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"measuring an index needs {name.partition('.')[0]}; type: pip install 'srl-search[ir]'"
        ) from error
