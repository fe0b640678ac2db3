"""Two indexes asked the same questions: what they have in common, and which of them is better."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from srl.data.relevance import Labelled
from srl.errors import UserError
from srl.evaluate.index_eval import Labels, Searched, lacking, measurable, measure, search_all
from srl.evaluate.ir_diff import Comparison, Difference, compare, difference
from srl.evaluate.retrieval_metrics import Figure, figure
from srl.trajectory import Question

_DEPTH = 100
_DECISIVE = {"judgements": "nDCG@10", "answers": "answer MRR"}
"""The measure by which questions are said to have changed most."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Two indexes on the same questions; `measures` and `values` (A's and B's) where labels are known."""

    k: int
    depth: int
    labels: Labels | None
    a: Searched
    b: Searched
    differences: dict[str, Difference]
    measures: dict[str, Comparison] = field(default_factory=dict)
    values: dict[str, tuple[dict[str, float], dict[str, float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def overlap(self) -> Figure:
        return figure([each.overlap for each in self.differences.values()])

    @property
    def rbo(self) -> Figure:
        return figure([each.rbo for each in self.differences.values()])

    @property
    def same_first(self) -> int:
        return sum(each.same_first for each in self.differences.values())

    @property
    def same_passages(self) -> int:
        return sum(each.overlap == 1.0 for each in self.differences.values())

    def change(self, name: str) -> tuple[str, float, float] | None:
        """The decisive measure of one question in A and in B; None where it was not measured."""
        measure = _DECISIVE[self.labels] if self.labels else ""
        a, b = self.values.get(measure, ({}, {}))
        return (measure, a[name], b[name]) if name in a else None

    def most_different(self, show: int) -> list[Difference]:
        """The questions whose measure changed most, then those with the least in common."""

        def order(each: Difference) -> tuple[float, float, float]:
            found = self.change(each.question)
            return (-abs(found[2] - found[1]) if found else 0.0, each.overlap, each.rbo)

        return sorted(self.differences.values(), key=order)[:show]


def compare_indexes(
    a: Any,
    b: Any,
    labelled: Labelled,
    k: int = 10,
    labels: Labels | None = None,
    progress: Callable[[int], None] | None = None,
) -> Compared:
    """Ask both indexes every question and compare the first `k` hits; passages are the same by their ids.

    Both are searched deeper than `k`, so that a tie at the cut is seen whole. Raises UserError where every
    search of one of them failed.
    """
    depth = max(_DEPTH, 2 * k)
    labels, questions, said = _measured_by(a, b, labelled, labels)
    of_a, of_b = found = [
        search_all(index, labelled.questions, depth, progress, labels == "answers") for index in (a, b)
    ]
    notes = [*labelled.notes, *_corpora(a, b, found), *_failures(found)]
    differences = {
        name: difference(name, hits, of_b.hits[name], k)
        for name, hits in of_a.hits.items()
        if not (name in of_a.failures or name in of_b.failures)
    }
    if not differences:
        raise UserError(f"there is nothing to compare: {'; '.join(_failures(found))}")
    notes += said
    if labels is None:
        return Compared(k, depth, None, of_a, of_b, differences, notes=notes)
    values = _values(found, labelled, labels, [each for each in questions if each.id in differences], k)
    measures = {name: compare(*pair) for name, pair in values.items()}
    return Compared(k, depth, labels, of_a, of_b, differences, measures, values, notes)


def _measured_by(
    a: Any, b: Any, labelled: Labelled, labels: Labels | None
) -> tuple[Labels | None, list[Question], list[str]]:
    """By what the two can be measured, on which questions, and what to say of it."""
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
    found: Sequence[Searched], labelled: Labelled, labels: Labels, questions: Sequence[Question], k: int
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Each measure's values by question, of A and of B."""
    of_a, of_b = (measure(one, questions, labelled, labels, (k,)) for one in found)
    return {name: (of_a[name], of_b[name]) for name in of_a if of_a[name]}


def _corpora(a: Any, b: Any, found: Sequence[Searched]) -> list[str]:
    """What to say where the two do not hold the same passages."""
    if a.manifest.corpus_digest == b.manifest.corpus_digest and not (a.live or b.live):
        return []
    said = "the corpora differ: passages are compared by their ids"
    shares = [_known(found[0], b), _known(found[1], a)]
    if None in shares:
        return [said]
    return [f"{said}; {shares[0]:.0%} of what A finds is in B, {shares[1]:.0%} of what B finds is in A"]


def _known(found: Searched, other: Any) -> float | None:
    """The share of the passages found that another index has; None where it cannot be told."""
    if other.passages is None:
        return None
    names = {name for ranking in found.rankings().values() for name in ranking}
    return fmean(other.passages.row(name) is not None for name in names) if names else None


def _failures(found: Sequence[Searched]) -> list[str]:
    return [
        f"{len(one.failures):,} searches of {name} failed, their questions are left out: "
        f"{next(iter(one.failures.values()))}"
        for name, one in zip("AB", found, strict=True)
        if one.failures
    ]
