"""The rows of a table over question sets: each set, the mean over sets, and all questions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from srl.evaluate.budget import Sample, SampleEstimate, estimate
from srl.evaluate.episode_results import EpisodeResult

MEASURES = {"em": "EM", "f1": "F1", "cover_em": "cover-EM"}
"""The measures of the table: a field of `EpisodeResult`, and its name."""
MEAN_OVER_SETS = "mean over sets"
ALL_QUESTIONS = "all questions"


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or a mean of all: `used` of its `size` questions were asked, and `measures` by field."""

    name: str
    used: int
    size: int
    measures: Mapping[str, SampleEstimate]


def suite_rows(results: Iterable[EpisodeResult], sample: Sample) -> list[Row]:
    """A row for each set of `sample` and, of several, the mean over sets and that over all questions.

    Means are of the full sets, estimated from the questions drawn; several samples of a question count as
    their mean. Results of other questions are left out. Raises KeyError for a question without a result.
    """
    values = _by_question(results, set(sample.ids))
    rows = [_row(name, sample.of(name), values) for name in sample.sets]
    if len(rows) < 2:
        return rows
    return [*rows, _row(MEAN_OVER_SETS, sample, values), _row(ALL_QUESTIONS, sample, values)]


def _row(name: str, sample: Sample, values: Mapping[str, Mapping[str, float]]) -> Row:
    over = "questions" if name == ALL_QUESTIONS else "sets"
    found = {measure: estimate(values[measure], sample, over) for measure in MEASURES}
    return Row(name, len(sample.ids), sample.size, found)


def _by_question(results: Iterable[EpisodeResult], asked: set[str]) -> dict[str, dict[str, float]]:
    """The mean of each measure over the samples of each question."""
    episodes: dict[str, list[EpisodeResult]] = defaultdict(list)
    for result in results:
        if result.question_id in asked:
            episodes[result.question_id].append(result)
    return {
        measure: {name: _mean(found, measure) for name, found in episodes.items()} for measure in MEASURES
    }


def _mean(episodes: Sequence[EpisodeResult], measure: str) -> float:
    return fmean(getattr(episode, measure) for episode in episodes)
