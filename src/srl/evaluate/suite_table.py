"""The rows of a table over question sets: each set, the mean over sets, and all questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from srl.evaluate.budget import Mean, Sample, SampleEstimate, estimate
from srl.evaluate.coverage import Coverage
from srl.evaluate.episode_results import EpisodeResult

MEASURES = {"em": "EM", "f1": "F1", "cover_em": "cover-EM"}
"""The measures of the table: a field of `EpisodeResult`, and its name."""
MEAN_OVER_SETS = "mean over sets"
ALL_QUESTIONS = "all questions"
MEANS = {MEAN_OVER_SETS, ALL_QUESTIONS}


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or a mean of all: `used` of its `size` questions were asked, and `measures` by field.

    `answerable` is the share of these questions that the corpus can answer, and `em_answerable` exact match
    on them; None where that is not known.
    """

    name: str
    used: int
    size: int
    measures: Mapping[str, SampleEstimate]
    answerable: float | None = None
    em_answerable: float | None = None


def suite_rows(
    results: Iterable[EpisodeResult], sample: Sample, covered: Mapping[str, Coverage] | None = None
) -> list[Row]:
    """A row for each set of `sample` and, of several, the mean over sets and that over all questions.

    Means are of the full sets, estimated from the questions drawn; several samples of a question count as
    their mean. Results of other questions do not count. Raises KeyError for a question without a result.
    """
    episodes: dict[str, list[EpisodeResult]] = {}
    for result in results:
        episodes.setdefault(result.question_id, []).append(result)
    rows = []
    for name in sample.sets:
        part = sample.of(name)
        share, em = _of_answerable(part, episodes, covered or {})
        rows.append(replace(_row(name, part, episodes), answerable=share, em_answerable=em))
    if len(rows) < 2:
        return rows
    over_sets = _answerable(_row(MEAN_OVER_SETS, sample, episodes), rows, [1] * len(rows))
    over_all = _answerable(_row(ALL_QUESTIONS, sample, episodes), rows, [row.size for row in rows])
    return [*rows, over_sets, over_all]


def _of_answerable(
    part: Sample, episodes: Mapping[str, Sequence[EpisodeResult]], covered: Mapping[str, Coverage]
) -> tuple[float | None, float | None]:
    """The share of a set's questions that are answerable, and exact match on these; None where unknown.

    Each question drawn stands for N / n of its stratum, of whose N questions n were drawn.
    """
    shares, ems = list[tuple[float | None, float]](), list[tuple[float | None, float]]()
    for stratum, ids in part.drawn.items():
        for question in ids:
            known, weight = covered.get(question), part.sizes[stratum] / len(ids)
            if known is not None and known.answerable is not None:
                shares.append((float(known.answerable), weight))
                ems.append((_mean(episodes[question], "em"), weight * known.answerable))
    return _weighted(shares), _weighted(ems)


def _answerable(mean: Row, rows: Sequence[Row], weights: Sequence[int]) -> Row:
    """`mean` with the means of the sets for which they are known.

    Over all questions, a set's exact match on the answerable counts as often as it has such questions.
    """
    shares = [(row.answerable, weight) for row, weight in zip(rows, weights, strict=True)]
    counted = [weight if mean.name == MEAN_OVER_SETS else weight * (share or 0) for share, weight in shares]
    ems = [(row.em_answerable, weight) for row, weight in zip(rows, counted, strict=True)]
    return replace(mean, answerable=_weighted(shares), em_answerable=_weighted(ems))


def _weighted(values: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None and weight]
    return (
        sum(value * weight for value, weight in known) / sum(weight for _, weight in known) if known else None
    )


def _row(name: str, sample: Sample, episodes: Mapping[str, Sequence[EpisodeResult]]) -> Row:
    asked = {question: episodes[question] for question in sample.ids}
    documents = {question: found[0].cluster for question, found in asked.items()}
    over: Mean = "questions" if name == ALL_QUESTIONS else "sets"
    measures = {}
    for measure in MEASURES:
        values = {question: _mean(found, measure) for question, found in asked.items()}
        measures[measure] = estimate(values, sample, over, documents)
    return Row(name, len(sample.ids), sample.size, measures)


def _mean(episodes: Sequence[EpisodeResult], measure: str) -> float:
    return fmean(getattr(episode, measure) for episode in episodes)
