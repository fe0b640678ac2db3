"""The rows of a table over question sets: each set, the mean over sets, and all questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from srl.evaluate.budget import Mean, Sample, SampleEstimate, estimate
from srl.evaluate.episode_results import EpisodeResult

MEASURES = {"em": "EM", "f1": "F1", "cover_em": "cover-EM"}
"""The measures of the table: a field of `EpisodeResult`, and its name."""
MEAN_OVER_SETS = "mean over sets"
ALL_QUESTIONS = "all questions"
MEANS = {MEAN_OVER_SETS, ALL_QUESTIONS}


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
    their mean. Results of other questions do not count. Raises KeyError for a question without a result.
    """
    episodes: dict[str, list[EpisodeResult]] = {}
    for result in results:
        episodes.setdefault(result.question_id, []).append(result)
    rows = [_row(name, sample.of(name), episodes) for name in sample.sets]
    if len(rows) < 2:
        return rows
    return [*rows, _row(MEAN_OVER_SETS, sample, episodes), _row(ALL_QUESTIONS, sample, episodes)]


def _row(name: str, sample: Sample, episodes: Mapping[str, Sequence[EpisodeResult]]) -> Row:
    asked = {question: episodes[question] for question in sample.ids}
    documents = {question: found[0].document or question for question, found in asked.items()}
    over: Mean = "questions" if name == ALL_QUESTIONS else "sets"
    measures = {}
    for measure in MEASURES:
        values = {question: _mean(found, measure) for question, found in asked.items()}
        measures[measure] = estimate(values, sample, over, documents)
    return Row(name, len(sample.ids), sample.size, measures)


def _mean(episodes: Sequence[EpisodeResult], measure: str) -> float:
    return fmean(getattr(episode, measure) for episode in episodes)
