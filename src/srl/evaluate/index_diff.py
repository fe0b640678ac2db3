"""Two indexes asked the same questions: where their rankings differ, and which index is better."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from srl.data.relevance import LabelledQuestions
from srl.errors import UserError
from srl.evaluate.index_eval import (
    Labels,
    SearchResults,
    documents_of,
    lacking,
    measurable,
    measure,
    search_all,
    too_few_documents,
)
from srl.evaluate.intervals import (
    NO_INTERVAL,
    Estimate,
    difference_interval,
    estimate,
)
from srl.evaluate.paired_tests import paired_p
from srl.trajectory import Question

PERSISTENCE = 0.9
"""The persistence p of rank-biased overlap: with 0.9 the first ten ranks carry 86% of the weight."""


@dataclass(frozen=True, slots=True)
class RankingDiff:
    """How two rankings of one question differ in their first k."""

    question: str
    overlap: float
    rbo: float
    same_first: bool


@dataclass(frozen=True, slots=True)
class MeasureDiff:
    """One measure of A and of B over the same questions: B - A, its interval, and a paired test's p."""

    a: Estimate
    b: Estimate
    change: Estimate
    better: int
    worse: int
    p: float


def ranking_diff(
    question: str, a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]], k: int
) -> RankingDiff:
    """Compare the first `k` of two lists of (passage, score)."""
    ids_a, ids_b = ([passage for passage, _ in hits[:k]] for hits in (a, b))
    return RankingDiff(question, overlap_at(a, b, k), rank_biased_overlap(ids_a, ids_b), _same_first(a, b))


def overlap_at(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]], k: int) -> float:
    """The share of passages that two lists have in common in their first `k`, with ties pooled.

    Where a list is cut inside a tie, it is chance which of the tied passages are in. So a passage counts as
    common if the other list has it in its first `k` or in the tie at its cut (the lists may be longer than
    `k` to show the tie). Two empty lists are equal.
    """
    first_a, first_b = (list(dict.fromkeys(name for name, _ in hits[:k])) for hits in (a, b))
    longer = max(len(first_a), len(first_b))
    if not longer:
        return 1.0
    from_a = len(set(first_a) & _with_ties(b, k))
    from_b = len(set(first_b) & _with_ties(a, k))
    return min(max(from_a, from_b), longer) / longer


def _with_ties(hits: Sequence[tuple[str, float]], k: int) -> set[str]:
    """The first `k` passages, and those after them with the same score as the last."""
    if len(hits) <= k:
        return {name for name, _ in hits}
    cut = hits[k - 1][1]
    return {name for place, (name, score) in enumerate(hits) if place < k or score == cut}


def rank_biased_overlap(a: Sequence[str], b: Sequence[str], persistence: float = PERSISTENCE) -> float:
    """The similarity of two rankings, weighted to the top: 1 for equal lists, 0 for disjoint ones.

        RBO = (1 - p) Σ_{d=1..k} p^(d-1) |A_d ∩ B_d| / d  +  p^k |A_k ∩ B_k| / k

    where A_d and B_d are the first d of each; the second term extrapolates the agreement at the end. A list
    that ends before the other keeps its set, and the larger of the two sets replaces d. Source: Webber,
    Moffat and Zobel (2010), A similarity measure for indefinite rankings (there, RBO_EXT).
    """
    k = max(len(a), len(b))
    if not k:
        return 1.0
    seen_a: set[str] = set()
    seen_b: set[str] = set()
    total = agreement = 0.0
    for depth in range(1, k + 1):
        seen_a.update(a[depth - 1 : depth])
        seen_b.update(b[depth - 1 : depth])
        agreement = len(seen_a & seen_b) / max(len(seen_a), len(seen_b))
        total += persistence ** (depth - 1) * agreement
    return min(1.0, (1 - persistence) * total + persistence**k * agreement)  # rounding may exceed 1


def _same_first(a: Sequence[tuple[str, float]], b: Sequence[tuple[str, float]]) -> bool:
    """Whether the best passage is the same, up to ties; also true where both lists are empty."""
    if not (a and b):
        return not (a or b)
    return a[0][0] in _with_ties(b, 1) or b[0][0] in _with_ties(a, 1)


def measure_diff(
    a: Mapping[str, float], b: Mapping[str, float], documents: Mapping[str, Hashable] | None = None
) -> MeasureDiff:
    """One measure of two indexes, on the questions measured for both.

    `documents` names for each question the document that it depends on.
    """
    names = [name for name in a if name in b]
    changes = [b[name] - a[name] for name in names]
    clusters = [(documents or {}).get(name, name) for name in names]
    return MeasureDiff(
        estimate([a[name] for name in names], clusters),
        estimate([b[name] for name in names], clusters),
        _change(changes, clusters),
        sum(change > 0 for change in changes),
        sum(change < 0 for change in changes),
        paired_p(changes, clusters),
    )


def _change(changes: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Their mean with the interval that `srl eval compare` gives a difference."""
    mean = fmean(changes)
    if len(changes) < 2:
        return Estimate(mean, *NO_INTERVAL)
    return Estimate(mean, *(difference_interval(changes, clusters) or NO_INTERVAL))


_DEPTH = 100
_DECISIVE = {"judgements": "nDCG@10", "answers": "answer MRR"}
"""The measure by which the most changed questions are chosen."""


@dataclass(frozen=True, slots=True)
class IndexDiff:
    """Two indexes on the same questions; `measures` and `values` (A's and B's) where labels are known."""

    k: int
    depth: int
    labels: Labels | None
    a: SearchResults
    b: SearchResults
    differences: dict[str, RankingDiff]
    documents: Mapping[str, Hashable] = field(default_factory=dict)
    measures: dict[str, MeasureDiff] = field(default_factory=dict)
    values: dict[str, tuple[dict[str, float], dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def overlap(self) -> Estimate:
        return self._mean([each.overlap for each in self.differences.values()])

    @property
    def rbo(self) -> Estimate:
        return self._mean([each.rbo for each in self.differences.values()])

    def _mean(self, values: Sequence[float]) -> Estimate:
        return estimate(values, [self.documents.get(name, name) for name in self.differences])

    @property
    def same_first(self) -> int:
        return sum(each.same_first for each in self.differences.values())

    @property
    def same_passages(self) -> int:
        return sum(each.overlap == 1.0 for each in self.differences.values())

    def change(self, name: str) -> tuple[str, float, float] | None:
        """The deciding measure of one question, and its values in A and B; None where it was not measured."""
        measure = _DECISIVE[self.labels] if self.labels else ""
        a, b = self.values.get(measure, ({}, {}))
        return (measure, a[name], b[name]) if name in a else None

    def most_different(self, show: int) -> list[RankingDiff]:
        """The questions whose measure changed most, then those with the least overlap."""

        def order(each: RankingDiff) -> tuple[float, float, float]:
            found = self.change(each.question)
            return (-abs(found[2] - found[1]) if found else 0.0, each.overlap, each.rbo)

        return sorted(self.differences.values(), key=order)[:show]


def diff_indexes(
    a: Any,
    b: Any,
    labelled: LabelledQuestions,
    k: int = 10,
    labels: Labels | None = None,
    progress: Callable[[int], None] | None = None,
) -> IndexDiff:
    """Search both indexes for every question and compare the first `k` hits by passage id.

    Both are searched deeper than `k`, to see ties at the cut. Raises UserError where every search of one of
    them failed.
    """
    depth = max(_DEPTH, 2 * k)
    labels, questions, said = _measured_by(a, b, labelled, labels)
    of_a, of_b = found = [
        search_all(
            index,
            labelled.questions,
            depth,
            progress,
            labels == "answers",
            k if index.passages is None else 0,
        )
        for index in (a, b)
    ]
    notes = [*labelled.notes, *_corpora(a, b, found), *_failures(found)]
    differences = {
        name: ranking_diff(name, hits, of_b.hits[name], k)
        for name, hits in of_a.hits.items()
        if not (name in of_a.failures or name in of_b.failures)
    }
    if not differences:
        raise UserError(f"there is nothing to compare: {'; '.join(_failures(found))}")
    documents = documents_of(each for each in labelled.questions if each.id in differences)
    notes += [*said, *too_few_documents(documents)]
    if labels is None:
        return IndexDiff(k, depth, None, of_a, of_b, differences, documents, notes=notes)
    values = _values(found, labelled, labels, [each for each in questions if each.id in differences], k)
    measures = {name: measure_diff(*pair, documents) for name, pair in values.items()}
    return IndexDiff(k, depth, labels, of_a, of_b, differences, documents, measures, values, notes)


def _measured_by(
    a: Any, b: Any, labelled: LabelledQuestions, labels: Labels | None
) -> tuple[Labels | None, list[Question], list[str]]:
    """The labels to measure by, the questions that have them, and notes for the user."""
    labels = labels or ("judgements" if labelled.judged else "answers" if labelled.has_answers else None)
    if labels is None:
        return None, [], []
    questions, said = measurable(labelled, labels)
    if labels == "answers":
        return labels, questions, said
    known = {name: lacking(index, labelled, questions) for name, index in (("A", a), ("B", b))}
    if all(len(absent) == len(relevant) for relevant, absent in known.values()):
        return None, [], ["none of the relevant passages is in either index: only the rankings are compared"]
    said += [
        f"{len(absent):,} of {len(relevant):,} relevant passages are not in {name}"
        for name, (relevant, absent) in known.items()
        if absent
    ]
    return labels, questions, said


def _values(
    found: Sequence[SearchResults],
    labelled: LabelledQuestions,
    labels: Labels,
    questions: Sequence[Question],
    k: int,
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Each measure's values by question, of A and of B."""
    of_a, of_b = (measure(one, questions, labelled, labels, (k,)) for one in found)
    return {name: (of_a[name], of_b[name]) for name in of_a if of_a[name]}


def _corpora(a: Any, b: Any, found: Sequence[SearchResults]) -> list[str]:
    """A note where the two indexes have different passages."""
    if a.manifest.corpus_digest == b.manifest.corpus_digest and not (a.live or b.live):
        return []
    said = "the corpora differ: passages are compared by their ids"
    shares = [_known(found[0], b), _known(found[1], a)]
    if None in shares:
        return [said]
    return [f"{said}; {shares[0]:.0%} of what A finds is in B, {shares[1]:.0%} of what B finds is in A"]


def _known(found: SearchResults, other: Any) -> float | None:
    """The share of the found passages that another index has; None where it is unknown."""
    if other.passages is None:
        return None
    names = {name for ranking in found.rankings().values() for name in ranking}
    return fmean(other.passages.row(name) is not None for name in names) if names else None


def _failures(found: Sequence[SearchResults]) -> list[str]:
    return [
        f"{len(one.failures):,} searches of {name} failed, their questions are left out: "
        f"{next(iter(one.failures.values()))}"
        for name, one in zip("AB", found, strict=True)
        if one.failures
    ]
