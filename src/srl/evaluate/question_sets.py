"""The question sets of an evaluation: drawing a part of them (`--limit`), and the figures of each set.

Every set gives the same number of questions, at most all of its own, which makes the error of the mean over
sets smallest. The same questions are drawn each time, whatever the model, and a larger sample includes a
smaller one: each question has a fixed random number.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from statistics import fmean, variance

from srl.errors import UserError
from srl.evaluate.episode_results import EpisodeResult
from srl.evaluate.intervals import Interval, interval, wilson_interval

MEASURES = {"em": "EM", "f1": "F1", "cover_em": "cover-EM"}
"""The measures of a set: a field of `EpisodeResult`, and its name."""
MEAN_OVER_SETS = "mean over sets"
ALL_QUESTIONS = "all questions"


@dataclass(frozen=True, slots=True)
class Sample:
    """Questions drawn from sets, or all of them: the size of each set, and the ids drawn from it."""

    sizes: Mapping[str, int]
    drawn: Mapping[str, Sequence[str]]

    @property
    def ids(self) -> list[str]:
        return [name for names in self.drawn.values() for name in names]

    @property
    def size(self) -> int:
        """The number of questions in the full sets."""
        return sum(self.sizes.values())

    def within(self, part: Collection[str]) -> Sample:
        """The sample without the questions that are not in `part`."""
        drawn = {name: [each for each in ids if each in part] for name, ids in self.drawn.items()}
        drawn = {name: ids for name, ids in drawn.items() if ids}
        return Sample({name: self.sizes[name] for name in drawn}, drawn)


def draw(sets: Mapping[str, Sequence[str]], limit: int | None = None, seed: int = 0) -> Sample:
    """Draw `limit` ids from `sets`, or all where there are no more (or None); `seed` gives another draw.

    Raises UserError for a limit below one of each set.
    """
    sizes = {name: len(ids) for name, ids in sets.items()}
    if limit is not None and limit < len(sets):
        raise UserError(f"{limit} questions of {len(sets)} sets: a set needs one at least", key="limit")
    quotas, total = dict.fromkeys(sorted(sizes), 0), sum(sizes.values())
    for _ in range(total if limit is None else min(limit, total)):
        quotas[min((name for name in quotas if quotas[name] < sizes[name]), key=quotas.__getitem__)] += 1

    def number(name: str) -> bytes:
        """The random number of a question, the same on every machine."""
        return blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()

    return Sample(sizes, {name: sorted(ids, key=number)[: quotas[name]] for name, ids in sets.items()})


@dataclass(frozen=True, slots=True)
class SampleEstimate:
    """The mean of a measure over full sets, estimated from the questions drawn.

    `interval` is that of a mean over questions of this kind, as for any evaluation; None where they are of
    too few documents. `full` is that of the mean over the full sets only: the error of the draw, a point
    where nothing was left out.
    """

    mean: float
    interval: Interval | None
    full: Interval

    @property
    def draw_error(self) -> float:
        """The longer side of `full`: how far the mean over the full sets may be from the estimate."""
        return max(self.full.high - self.mean, self.mean - self.full.low)


@dataclass(frozen=True, slots=True)
class Row:
    """One set, or a mean of all: `used` of its `size` questions were asked, and `measures` by field."""

    name: str
    used: int
    size: int
    measures: Mapping[str, SampleEstimate]


def question_set_rows(results: Iterable[EpisodeResult], sample: Sample) -> list[Row]:
    """A row for each set of `sample` and, of several, the mean over sets and that over all questions.

    Means are of the full sets, estimated from the questions drawn; several samples of a question count as
    their mean. Results of other questions do not count. Raises KeyError for a question without a result.
    """
    episodes: dict[str, list[EpisodeResult]] = {}
    for result in results:
        episodes.setdefault(result.question_id, []).append(result)
    clusters = {name: episodes[name][0].cluster for name in sample.ids}
    values = {
        measure: {name: fmean(getattr(each, measure) for each in episodes[name]) for name in sample.ids}
        for measure in MEASURES
    }
    shares = {name: {name: 1.0} for name in sample.drawn}
    if len(shares) > 1:
        shares[MEAN_OVER_SETS] = dict.fromkeys(sample.drawn, 1 / len(sample.drawn))
        shares[ALL_QUESTIONS] = {name: size / sample.size for name, size in sample.sizes.items()}
    return [
        Row(
            name,
            sum(len(sample.drawn[part]) for part in share),
            sum(sample.sizes[part] for part in share),
            {measure: estimate(means, sample, share, clusters) for measure, means in values.items()},
        )
        for name, share in shares.items()
    ]


def estimate(
    values: Mapping[str, float],
    sample: Sample,
    share: Mapping[str, float],
    clusters: Mapping[str, Hashable],
) -> SampleEstimate:
    """The mean of a measure in [0, 1], with its value by question, in which each set has its `share`.

    `clusters` names what a question depends on together with others, its source document.

    `full` is Wilson's interval for the variance of the draw alone, Σ w² (1 - n/N) s² / n, with the finite
    population correction 1 - n/N (Cochran, 1977, Sampling Techniques, chapter 5).
    """
    drawn = {name: [values[question] for question in sample.drawn[name]] for name in share}
    ids = [question for name in share for question in sample.drawn[name]]
    mean = sum(weight * fmean(drawn[name]) for name, weight in share.items())
    bounds = interval(
        [values[question] for question in ids],
        [clusters.get(question, (question,)) for question in ids],
        weights=[share[name] * len(ids) / len(part) for name, part in drawn.items() for _ in part],
    )
    factors = {
        name: share[name] ** 2 * (1 - len(part) / sample.sizes[name]) / len(part)
        for name, part in drawn.items()
    }
    if not any(factors.values()):
        return SampleEstimate(mean, bounds, Interval(mean, mean))
    spread = sum(factor * variance(drawn[name]) for name, factor in factors.items() if len(drawn[name]) > 1)
    questions = mean * (1 - mean) / spread if spread else 1 / sum(factors.values())
    return SampleEstimate(mean, bounds, wilson_interval(mean, questions))
