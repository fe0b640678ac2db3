"""A stratified sample of the questions of an evaluation (`--budget N`), and what it says about all of them.

Strata are the hops and the types of questions in each set. Every set gets the same number of questions (at
most all of its own), and within a set each stratum its share, at least two, which a variance needs. Equal
numbers make the error of the mean over sets smallest, and the sets' own errors about equal; in proportion to
size, 400 of Search-R1's 51,713 test questions would include one of Bamboogle's 125. Neyman's allocation would
need the standard deviation of each stratum. That depends on the model, so two models would be asked different
questions, and the gain is small: for EM between 0.1 and 0.9 it is between 0.3 and 0.5.

The same questions are drawn each time, and a larger budget includes those of a smaller one: each question has
a fixed random number (a hash of its id), a stratum gives those with the smallest numbers, and the allocation
adds one question at a time. Estimates weight each stratum by its size in the full sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import isclose, sqrt
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from srl.errors import UserError
from srl.evaluate.intervals import (
    MIN_CLUSTERS,
    ClusterSums,
    Interval,
    interval,
    student_t,
    wilson_interval,
)
from srl.files import FORMAT, digest_text, write_json
from srl.trajectory import Question

LEAST = 2
"""Questions of each stratum that are drawn at least, where it has as many."""
RARE = 0.05
"""Strata with a smaller share of their set are put together."""
OTHER = "other"
"""The name of the stratum of rare ones."""
_SHRINKAGE = 20
"""How many values the variance of all strata together counts, beside those of a stratum itself."""
Mean = Literal["sets", "questions"]


class Stratum(NamedTuple):
    """Questions of one set with the same hops and type; `label` is empty where neither is known."""

    set: str
    label: str


@dataclass(frozen=True, slots=True)
class Sample:
    """Questions drawn from sets, or all of them: for each stratum its size and the ids drawn."""

    sizes: Mapping[Stratum, int]
    drawn: Mapping[Stratum, tuple[str, ...]]

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(stratum.set for stratum in self.sizes))

    @property
    def ids(self) -> list[str]:
        return [name for names in self.drawn.values() for name in names]

    @property
    def size(self) -> int:
        """The number of questions in the full sets."""
        return sum(self.sizes.values())

    @property
    def complete(self) -> bool:
        return len(self.ids) == self.size

    def file_in(self, directory: Path) -> Path:
        """The file of these questions in the directory of a run."""
        return directory / f"questions-{digest_text(*sorted(self.ids))[:8]}.json"

    def save(self, directory: Path, about: Mapping[str, object]) -> Path:
        """Write which questions were used, by set, and the strata. Returns the file."""
        strata = [
            {**stratum._asdict(), "size": size, "drawn": len(self.drawn[stratum])}
            for stratum, size in self.sizes.items()
        ]
        ids = {name: sorted(self.of(name).ids) for name in self.sets}
        path = self.file_in(directory)
        write_json(path, {"format": FORMAT, **about, "strata": strata, "ids": ids})
        return path

    def of(self, name: str) -> Sample:
        """The part of one set."""
        sizes = {stratum: size for stratum, size in self.sizes.items() if stratum.set == name}
        return Sample(sizes, {stratum: self.drawn[stratum] for stratum in sizes})


@dataclass(frozen=True, slots=True)
class SampleEstimate:
    """The mean of a measure over the full sets, estimated from a sample.

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


def draw(sets: Mapping[str, Sequence[Question]], budget: int | None = None, seed: int = 0) -> Sample:
    """Draw `budget` questions from `sets`, or all where there are no more (or None).

    `seed` gives another draw. Raises UserError for fewer than two questions a stratum.
    """
    strata = dict(_strata(sets))
    sizes = {stratum: len(ids) for stratum, ids in strata.items()}
    if budget is None or budget >= sum(sizes.values()):
        return Sample(sizes, {stratum: tuple(ids) for stratum, ids in strata.items()})
    taken = allocation(sizes, budget)
    drawn = {
        stratum: tuple(sorted(ids, key=lambda name: _number(name, seed))[: taken[stratum]])
        for stratum, ids in strata.items()
    }
    return Sample(sizes, drawn)


@dataclass(frozen=True, slots=True)
class Selection:
    """The questions that an evaluation asks: `budget` of them, or all, by sets.

    `set_of` names the set of a question by its id; others are of the set of their data source. `about` is
    written to the file of the questions used.
    """

    budget: int | None = None
    set_of: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, object] = field(default_factory=dict)

    def draw(self, questions: Iterable[Question]) -> Sample:
        """The sample of `questions`. Raises UserError for a budget that is too small."""
        sets: dict[str, list[Question]] = {name: [] for name in dict.fromkeys(self.set_of.values())}
        for question in questions:
            sets.setdefault(self.set_of.get(question.id, question.data_source), []).append(question)
        return draw({name: found for name, found in sets.items() if found}, self.budget)

    def save(self, sample: Sample, directory: Path) -> Path:
        """Write which questions were used, in a file of their own in `directory`."""
        return sample.save(directory, {"budget": self.budget, **self.about})


def _strata(sets: Mapping[str, Sequence[Question]]) -> Iterator[tuple[Stratum, list[str]]]:
    """The ids of each stratum; those of rare ones are together in the stratum `other`."""
    for name, questions in sets.items():
        found: dict[str, list[str]] = defaultdict(list)
        for question in questions:
            found[_label(question)].append(question.id)
        least = max(LEAST, RARE * len(questions))
        rare = [label for label in sorted(found) if len(found[label]) < least]
        merged = [one for label in rare for one in found.pop(label)] if len(rare) > 1 else []
        if merged:  # beside those whose type has this very name
            found[OTHER] += merged
        for label in sorted(found):
            yield Stratum(name, label), found[label]


def _label(question: Question) -> str:
    hops, kind = question.hops, question.metadata.get("type")
    parts = ("" if hops is None else f"{hops} hops", str(kind or ""))
    return ", ".join(part for part in parts if part)


def _number(name: str, seed: int) -> bytes:
    """The random number of a question, the same on every machine."""
    return blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()


def allocation(sizes: Mapping[Stratum, int], budget: int) -> dict[Stratum, int]:
    """How many questions of each stratum a budget takes; no stratum gets fewer from a larger budget.

    After the least of each stratum, each further question goes to the set with the fewest so far, and there
    to the stratum with the largest size / (2·taken + 1), Webster's (Sainte-Laguë's) method.
    """
    taken = {stratum: min(LEAST, size) for stratum, size in sizes.items()}
    least = sum(taken.values())
    if budget < least:
        raise UserError(
            f"a budget of {budget} questions is too small: {len(sizes)} strata (set, hops, type) take "
            f"{LEAST} each; give --budget {least} or more"
        )
    inside: dict[str, list[Stratum]] = defaultdict(list)
    for stratum in sorted(sizes):
        inside[stratum.set].append(stratum)
    used = {name: sum(taken[stratum] for stratum in strata) for name, strata in inside.items()}
    room = {name: sum(sizes[stratum] for stratum in strata) for name, strata in inside.items()}
    for _ in range(min(budget, sum(room.values())) - least):
        name = min((one for one in used if used[one] < room[one]), key=used.__getitem__)
        open_ones = (stratum for stratum in inside[name] if taken[stratum] < sizes[stratum])
        taken[max(open_ones, key=lambda one: sizes[one] / (2 * taken[one] + 1))] += 1
        used[name] += 1
    return taken


def estimate(
    values: Mapping[str, float],
    sample: Sample,
    over: Mean = "sets",
    clusters: Mapping[str, Hashable] | None = None,
    confidence: float = 0.95,
) -> SampleEstimate:
    """The mean over the full sets of a measure with these `values` in [0, 1] by question id.

    `over="sets"`: the mean of the sets' means (the macro mean), `"questions"`: the mean over all questions.
    Each stratum counts with its share w of the full sets, whatever was drawn of it: mean = Σ w ȳ. `clusters`
    names the source document of each question. Raises KeyError for a question of the sample without a value.
    """
    weights = _weights(sample, over)
    drawn = {stratum: [values[name] for name in names] for stratum, names in sample.drawn.items()}
    mean = sum(weights[stratum] * fmean(found) for stratum, found in drawn.items())
    named = None if clusters is None else [clusters[name] for name in sample.ids]
    general = _general_interval(mean, drawn, weights, over, named, confidence)
    return SampleEstimate(mean, general, _full_interval(mean, drawn, weights, sample.sizes, confidence))


def _general_interval(
    mean: float,
    drawn: Mapping[Stratum, Sequence[float]],
    weights: Mapping[Stratum, float],
    over: Mean,
    clusters: Sequence[Hashable] | None,
    confidence: float,
) -> Interval | None:
    """`interval` of one set whose questions all weigh the same, else the one of `_adjusted`.

    With `clusters` its variance is multiplied by the design effect: the variance by clusters by that of
    independent questions, both of the linearised values

        u = mean + n W (y - centre),   W the weight of a question, centre the mean of its set or of all

    (Särndal, Swensson and Wretman, 1992, Model Assisted Survey Sampling, chapter 5).
    """
    sets = {stratum.set for stratum in drawn} if over == "sets" else {""}
    total = sum(map(len, drawn.values()))
    if len(sets) == 1 and all(isclose(total * weights[one], len(drawn[one])) for one in drawn):
        return interval([value for found in drawn.values() for value in found], clusters, confidence)
    centres = {stratum.set: mean for stratum in drawn}
    if over == "sets":
        centres = {name: _set_mean(name, drawn, weights) for name in sets}
    linear = [
        mean + total * weights[stratum] / len(found) * (value - centres[stratum.set])
        for stratum, found in drawn.items()
        for value in found
    ]
    sums, alone = ClusterSums.of(linear, clusters), ClusterSums.of(linear, None)
    if not sums.independent and sums.effective < MIN_CLUSTERS:
        return None
    design = sums.variance / alone.variance if alone.variance else sums.count / sums.effective
    centre, variance = _adjusted(drawn, weights)
    half = student_t(sums.effective - 1, confidence) * sqrt(variance * max(1.0, design))
    return Interval(max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def _adjusted(
    drawn: Mapping[Stratum, Sequence[float]], weights: Mapping[Stratum, float]
) -> tuple[float, float]:
    """Centre and variance of the interval of a weighted mean of m sets.

    Each set gets 2/m values of 1 and 2/m values of 0 more, so that one without a right answer does not look
    certain; it counts as its effective number of questions, 1 / Σ w²/n with its strata's shares w. Source:
    Price and Bonett (2004), An improved confidence interval for a linear function of binomial proportions.
    """
    names = sorted({stratum.set for stratum in drawn})
    more, centre, variance = 2 / len(names), 0.0, 0.0
    for name in names:
        strata = [stratum for stratum in drawn if stratum.set == name]
        weight = sum(weights[stratum] for stratum in strata)
        shares = {stratum: weights[stratum] / weight for stratum in strata}
        count = 1 / sum(share**2 / len(drawn[stratum]) for stratum, share in shares.items())
        first, second = (
            (count * sum(share * fmean(v**power for v in drawn[one]) for one, share in shares.items()) + more)
            / (count + 2 * more)
            for power in (1, 2)
        )
        centre += weight * first
        variance += weight**2 * (second - first**2) / (count + 2 * more)
    return centre, variance


def _set_mean(name: str, drawn: Mapping[Stratum, Sequence[float]], weights: Mapping[Stratum, float]) -> float:
    parts = [(weights[stratum], fmean(found)) for stratum, found in drawn.items() if stratum.set == name]
    return sum(weight * mean for weight, mean in parts) / sum(weight for weight, _ in parts)


def _full_interval(
    mean: float,
    drawn: Mapping[Stratum, Sequence[float]],
    weights: Mapping[Stratum, float],
    sizes: Mapping[Stratum, int],
    confidence: float,
) -> Interval:
    """The interval of the mean over the full sets, in which only the draw is random:

        variance = Σ w² (1 - n/N) s²/n,   1 - n/N the finite population correction

    It is Wilson's, for the number of independent questions whose mean has this variance (where all values
    are equal, the number for equal variances). Sources: Cochran (1977), Sampling Techniques, chapter 5; Korn
    and Graubard (1998), Confidence intervals for proportions with small expected number of positive counts
    estimated from survey data.
    """
    spreads = _spreads(drawn)
    factors = {
        stratum: weights[stratum] ** 2 * (1 - len(found) / sizes[stratum]) / len(found)
        for stratum, found in drawn.items()
    }
    if not any(factors.values()):
        return Interval(mean, mean)
    seen = sum(factor * spreads[stratum] for stratum, factor in factors.items())
    if not seen:  # all values drawn are equal, or those of each stratum
        return wilson_interval(mean, 1 / sum(factors.values()), confidence)
    return wilson_interval(mean, mean * (1 - mean) / seen, confidence)


def _weights(sample: Sample, over: Mean) -> dict[Stratum, float]:
    """The weight of each stratum; they add up to 1."""
    if over == "questions":
        return {stratum: size / sample.size for stratum, size in sample.sizes.items()}
    totals: dict[str, int] = defaultdict(int)
    for stratum, size in sample.sizes.items():
        totals[stratum.set] += size
    return {stratum: size / totals[stratum.set] / len(totals) for stratum, size in sample.sizes.items()}


def _spreads(drawn: Mapping[Stratum, Sequence[float]]) -> dict[Stratum, float]:
    """The variance of the values of each stratum, shrunk towards that within all strata together.

    A stratum of few values, or with none that is right, would else look certain.
    """
    squares = {stratum: _squares(found) for stratum, found in drawn.items()}
    freedom = sum(len(found) - 1 for found in drawn.values())
    pooled = sum(squares.values()) / freedom if freedom else 0.0
    return {
        stratum: (squares[stratum] + _SHRINKAGE * pooled) / (len(found) - 1 + _SHRINKAGE)
        for stratum, found in drawn.items()
    }


def _squares(values: Sequence[float]) -> float:
    """The sum of squared deviations from the mean."""
    mean = fmean(values)
    return sum((value - mean) ** 2 for value in values)
