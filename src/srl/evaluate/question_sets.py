"""The rows of a table over question sets: each set, the mean over sets, and all questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from srl.evaluate.coverage import Coverage
from srl.evaluate.episode_results import EpisodeResult
from srl.evaluate.sample import Sample, SampleEstimate, estimate

MEASURES = {"em": "EM", "f1": "F1", "cover_em": "cover-EM"}
"""The measures of the table: a field of `EpisodeResult`, and its name."""
MEAN_OVER_SETS = "mean over sets"
ALL_QUESTIONS = "all questions"


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or a mean of all: `used` of its `size` questions were asked, and `measures` by field.

    `answerable` is the share of the questions asked that the corpus can answer, and `em_answerable` exact
    match on them; None where that is not known.
    """

    name: str
    used: int
    size: int
    measures: Mapping[str, SampleEstimate]
    answerable: float | None = None
    em_answerable: float | None = None


def question_set_rows(
    results: Iterable[EpisodeResult], sample: Sample, covered: Mapping[str, Coverage] | None = None
) -> list[Row]:
    """A row for each set of `sample` and, of several, the mean over sets and that over all questions.

    Means are of the full sets, estimated from the questions drawn; several samples of a question count as
    their mean. Results of other questions do not count. Raises KeyError for a question without a result.
    """
    episodes: dict[str, list[EpisodeResult]] = {}
    for result in results:
        episodes.setdefault(result.question_id, []).append(result)
    rows = [_row(name, sample.of(name), episodes, covered or {}) for name in sample.sets]
    if len(rows) > 1:
        rows += [_row(name, sample, episodes, covered or {}) for name in (MEAN_OVER_SETS, ALL_QUESTIONS)]
    return rows


def _row(
    name: str,
    sample: Sample,
    episodes: Mapping[str, Sequence[EpisodeResult]],
    covered: Mapping[str, Coverage],
) -> Row:
    documents = {question: episodes[question][0].cluster for question in sample.ids}
    values = {
        measure: {
            question: fmean(getattr(each, measure) for each in episodes[question]) for question in sample.ids
        }
        for measure in MEASURES
    }
    over = "questions" if name == ALL_QUESTIONS else "sets"
    measures = {
        measure: estimate(of_question, sample, over, documents)  # type: ignore[arg-type]
        for measure, of_question in values.items()
    }
    row = Row(name, len(sample.ids), sample.size, measures)
    known = [question for question in sample.ids if question in covered]
    known = [question for question in known if covered[question].answerable is not None]
    if name == MEAN_OVER_SETS or not known:
        return row
    right = [values["em"][question] for question in known if covered[question].answerable]
    return Row(
        row.name, row.used, row.size, measures, len(right) / len(known), fmean(right) if right else None
    )
