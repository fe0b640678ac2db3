"""A stratified sample of the questions of an evaluation (`--budget N`), and what it says about all of them.

Strata are the hops and the types of questions in each set. Every set gets the same number of questions (at
most all of its own), which makes the error of the mean over sets smallest; within a set each stratum gets its
share, at least two, which a variance needs. The same questions are drawn each time, whatever the model, and a
larger budget includes those of a smaller one: each question has a fixed random number, and the allocation
adds one question at a time. Estimates weight each stratum by its size in the full sets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
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
"""Strata with a smaller share of their set are put together, as `other`."""
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

    def of(self, name: str) -> Sample:
        """The part of one set."""
        sizes = {stratum: size for stratum, size in self.sizes.items() if stratum.set == name}
        return Sample(sizes, {stratum: self.drawn[stratum] for stratum in sizes})

    def file_in(self, directory: Path) -> Path:
        """The file of these questions in the directory of a run."""
        return directory / f"questions-{digest_text(*sorted(self.ids))[:8]}.json"

    def weights(self, over: Mean) -> dict[Stratum, float]:
        """The weight of each stratum in the mean `over` sets or questions; they add up to 1."""
        if over == "questions":
            return {stratum: size / self.size for stratum, size in self.sizes.items()}
        totals: dict[str, int] = defaultdict(int)
        for stratum, size in self.sizes.items():
            totals[stratum.set] += size
        return {stratum: size / totals[stratum.set] / len(totals) for stratum, size in self.sizes.items()}


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
        return draw({name: asked for name, asked in sets.items() if asked}, self.budget)

    def save(self, sample: Sample, directory: Path) -> None:
        """Write which questions were used, by set, and the strata, in a file of their own in `directory`."""
        strata = [
            {**stratum._asdict(), "size": size, "drawn": len(sample.drawn[stratum])}
            for stratum, size in sample.sizes.items()
        ]
        ids = {name: sorted(sample.of(name).ids) for name in sample.sets}
        about = {"format": FORMAT, "budget": self.budget, **self.about}
        write_json(sample.file_in(directory), {**about, "strata": strata, "ids": ids})


def draw(sets: Mapping[str, Sequence[Question]], budget: int | None = None, seed: int = 0) -> Sample:
    """Draw `budget` questions from `sets`, or all where there are no more (or None).

    `seed` gives another draw. Raises UserError for fewer than two questions a stratum.
    """
    strata = {
        Stratum(name, label): ids
        for name, questions in sets.items()
        for label, ids in _by_label(questions).items()
    }
    sizes = {stratum: len(ids) for stratum, ids in strata.items()}
    taken = sizes if budget is None else allocation(sizes, budget)

    def number(name: str) -> bytes:
        """The random number of a question, the same on every machine."""
        return blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()

    drawn = {
        stratum: tuple(ids if taken[stratum] == len(ids) else sorted(ids, key=number)[: taken[stratum]])
        for stratum, ids in strata.items()
    }
    return Sample(sizes, drawn)


def _by_label(questions: Sequence[Question]) -> dict[str, list[str]]:
    """The ids of the questions by hops and type; those of rare ones are together under `other`."""
    labels: dict[str, list[str]] = defaultdict(list)
    for question in questions:
        hops = "" if question.hops is None else f"{question.hops} hops"
        labels[", ".join(filter(None, (hops, str(question.metadata.get("type") or ""))))].append(question.id)
    least = max(LEAST, RARE * len(questions))
    rare = [label for label in sorted(labels) if len(labels[label]) < least]
    if len(rare) > 1:
        together = [name for label in rare for name in labels.pop(label)]
        labels["other"] += together
    return {label: labels[label] for label in sorted(labels)}


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
            f"{LEAST} each",
            key="budget",
            hint=f"give --budget {least} or more",
        )
    strata: dict[str, list[Stratum]] = defaultdict(list)
    for stratum in sorted(sizes):
        strata[stratum.set].append(stratum)
    used = {name: sum(taken[stratum] for stratum in of) for name, of in strata.items()}
    room = {name: sum(sizes[stratum] for stratum in of) for name, of in strata.items()}
    for _ in range(min(budget, sum(room.values())) - least):
        name = min((name for name in used if used[name] < room[name]), key=used.__getitem__)
        unfilled = (stratum for stratum in strata[name] if taken[stratum] < sizes[stratum])
        taken[max(unfilled, key=lambda stratum: sizes[stratum] / (2 * taken[stratum] + 1))] += 1
        used[name] += 1
    return taken


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

    `full` is Wilson's interval for the variance of the draw alone, Σ w² (1 - n/N) s² / n, with the finite
    population correction 1 - n/N (Cochran, 1977, Sampling Techniques, chapter 5); s² is shrunk (`_spreads`).
    """
    weights = sample.weights(over)
    drawn = {stratum: [values[name] for name in names] for stratum, names in sample.drawn.items()}
    mean = sum(weights[stratum] * fmean(found) for stratum, found in drawn.items())
    documents = None if clusters is None else [clusters[name] for name in sample.ids]
    general = _general_interval(mean, drawn, weights, over, documents, confidence)
    factors = {
        stratum: weights[stratum] ** 2 * (1 - len(found) / sample.sizes[stratum]) / len(found)
        for stratum, found in drawn.items()
    }
    if not any(factors.values()):
        return SampleEstimate(mean, general, Interval(mean, mean))
    spreads = _spreads(drawn)
    variance = sum(factor * spreads[stratum] for stratum, factor in factors.items())
    questions = mean * (1 - mean) / variance if variance else 1 / sum(factors.values())
    return SampleEstimate(mean, general, wilson_interval(mean, questions, confidence))


def _general_interval(
    mean: float,
    drawn: Mapping[Stratum, Sequence[float]],
    weights: Mapping[Stratum, float],
    over: Mean,
    documents: Sequence[Hashable] | None,
    confidence: float,
) -> Interval | None:
    """`interval` where all questions weigh the same, else that of a weighted mean of m sets.

    Each set gets 2/m values of 1 and 2/m values of 0 more, so that one without a right answer does not look
    certain; it counts as its effective number of questions, 1 / Σ w²/n with its strata's shares w (Price and
    Bonett, 2004, An improved confidence interval for a linear function of binomial proportions).

    Documents multiply the variance by the design effect: the variance by documents over that of independent
    questions, both of the linearised values u = mean + n W (y - centre), W the weight of a question, centre
    the mean of its set or of all (Särndal, Swensson and Wretman, 1992, chapter 5).
    """
    names = sorted({stratum.set for stratum in drawn})
    total = sum(map(len, drawn.values()))
    flat = [value for found in drawn.values() for value in found]
    is_flat = all(isclose(total * weights[stratum], len(found)) for stratum, found in drawn.items())
    if is_flat and (over == "questions" or len(names) == 1):
        return interval(flat, documents, confidence)
    more, centre, variance = 2 / len(names), 0.0, 0.0
    centres = dict.fromkeys(names, mean)
    for name in names:
        weight = sum(weights[stratum] for stratum in drawn if stratum.set == name)
        shares = {stratum: weights[stratum] / weight for stratum in drawn if stratum.set == name}
        count = 1 / sum(share**2 / len(drawn[stratum]) for stratum, share in shares.items())
        plain, squared = (
            sum(share * fmean(value**power for value in drawn[stratum]) for stratum, share in shares.items())
            for power in (1, 2)
        )
        first, second = ((count * moment + more) / (count + 2 * more) for moment in (plain, squared))
        centre += weight * first
        variance += weight**2 * (second - first**2) / (count + 2 * more)
        if over == "sets":
            centres[name] = plain
    linear = [
        mean + total * weights[stratum] / len(found) * (value - centres[stratum.set])
        for stratum, found in drawn.items()
        for value in found
    ]
    sums, alone = ClusterSums.of(linear, documents), ClusterSums.of(linear, None)
    if not sums.independent and sums.effective < MIN_CLUSTERS:
        return None
    design = sums.variance / alone.variance if alone.variance else sums.count / sums.effective
    half = student_t(sums.effective - 1, confidence) * sqrt(variance * max(1.0, design))
    return Interval(max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def _spreads(drawn: Mapping[Stratum, Sequence[float]]) -> dict[Stratum, float]:
    """The variance of the values of each stratum, shrunk towards that within all strata together.

    A stratum of few values, or with none that is right, would else look certain.
    """
    squares = {
        stratum: sum((value - fmean(found)) ** 2 for value in found) for stratum, found in drawn.items()
    }
    freedom = sum(len(found) - 1 for found in drawn.values())
    pooled = sum(squares.values()) / freedom if freedom else 0.0
    return {
        stratum: (squares[stratum] + _SHRINKAGE * pooled) / (len(found) - 1 + _SHRINKAGE)
        for stratum, found in drawn.items()
    }
