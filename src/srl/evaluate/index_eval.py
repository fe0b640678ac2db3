"""Evaluating an index: search for every question, compare the hits with labels, and with another index."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol, TypeVar

from srl import process
from srl.answers import contains_answer, findable
from srl.data.relevance import LabelledQuestions
from srl.errors import UserError
from srl.evaluate.intervals import Estimate, estimate, too_few_clusters
from srl.evaluate.paired_tests import PairedTest, paired_test
from srl.evaluate.retrieval_metrics import (
    DEPTHS,
    answer_measures,
    document_of,
    ranking_measures,
    relevant_of,
)
from srl.index import Fault
from srl.serve.client import HttpSearch
from srl.serve.wire import MAX_QUERY_CHARS
from srl.trajectory import Hit, Question

T = TypeVar("T")
Labels = Literal["judgements", "answers"]
DECISIVE = {"judgements": "nDCG@10", "answers": "answer MRR"}
"""The measure by which questions are said to have changed most."""
OVERLAP_DEPTH = 10
_AT_ONCE = 256
"""Questions of one call of the index."""


class Searchable(Protocol):
    """An open index, or a served one; `passages` is None where the passages are not at hand."""

    passages: Any

    def outcomes(self, queries: list[str], k: int) -> list[Any]: ...


class ServedIndex:
    """The search server at `url`, ours or another's. Its passages are not at hand, only its hits.

    `digest` is that of the index it serves, empty where it tells none. Raises UserError where it does not
    answer.
    """

    passages = None

    def __init__(self, url: str) -> None:
        self.url = url
        self.digest = self._run(lambda client: client.connect())

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """The hits of each query, or why there are none."""
        searches = self._run(lambda client: asyncio.gather(*map(client.search, queries)), k)
        return [
            list(each.hits) if each.status in ("ok", "empty") else Fault(each.status, each.error)  # type: ignore[arg-type]
            for each in searches
        ]

    def _run(self, use: Callable[[HttpSearch], Awaitable[T]], k: int = 3) -> T:
        async def connected() -> T:
            client = HttpSearch(self.url, k, max_query_chars=MAX_QUERY_CHARS)
            try:
                return await use(client)
            finally:
                await client.aclose()

        return process.run_async(connected())


@dataclass(frozen=True, slots=True)
class IndexEvaluation:
    """The evaluation of an index: `metrics` over all questions, `values` of each, and notes for the user.

    `values` are `{measure: {question: value}}`; `documents` names for each question the document that it was
    written from, else the question: questions from one document are found or missed together. `hits` are ids
    and scores, best first; none where the search failed, with the reason in `failures`.
    """

    labels: Labels
    depth: int
    asked: int
    metrics: dict[str, Estimate]
    values: dict[str, dict[str, float]]
    documents: Mapping[str, Hashable]
    hits: Mapping[str, list[tuple[str, float]]]
    failures: Mapping[str, str]
    seconds: float
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> int:
        return len(self.documents)

    @property
    def failed(self) -> int:
        return len(self.failures)


def evaluate_index(
    index: Searchable,
    labelled: LabelledQuestions,
    depths: Sequence[int] = DEPTHS,
    labels: Labels | None = None,
    progress: Callable[[int], None] = lambda done: None,
    least_depth: int = OVERLAP_DEPTH,
) -> IndexEvaluation:
    """Evaluate `index` on labelled questions, by relevance judgements or by answers in the passages.

    Without `labels`, judgements are used where there are any. A failed search counts as nothing found. So
    many hits are searched as the largest of `depths`, and `least_depth` at least.
    Raises UserError where there are neither judgements nor answers, or where the index has none of the
    relevant passages.
    """
    labels = labels or ("judgements" if labelled.judged else "answers")
    questions, notes = _measurable(labelled, labels)
    judged = {question.id: labelled.judged.get(question.id, {}) for question in questions}
    if labels == "judgements":
        notes += _lacking(index, judged)
    depth, began = max(*depths, least_depth), perf_counter()
    hits, failures = dict[str, list[tuple[str, float]]](), dict[str, str]()
    answer_ranks: dict[str, int | None] = {}
    for start in range(0, len(questions), _AT_ONCE):
        batch = questions[start : start + _AT_ONCE]
        outcomes = index.outcomes([question.text for question in batch], depth)
        for question, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, Exception):
                failures[question.id], outcome = str(outcome), []
            hits[question.id] = [(hit.passage.id, hit.score) for hit in outcome]
            if labels == "answers":
                texts = (hit.passage.contents for hit in outcome)
                right = (contains_answer(text, question.golden_answers) for text in texts)
                answer_ranks[question.id] = next((rank for rank, has in enumerate(right, 1) if has), None)
        progress(start + len(batch))
    seconds = perf_counter() - began
    if labels == "judgements":
        rankings = {name: [passage for passage, _ in ranking] for name, ranking in hits.items()}
        values = ranking_measures(rankings, judged, depths)
        if index.passages is None and all(
            judged[name].keys().isdisjoint(ranking) for name, ranking in rankings.items()
        ):
            notes.append("no hit of any question was judged: are the ids those of the judgements?")
    else:
        values = answer_measures(answer_ranks, depths)
    documents = {each.id: document_of(each.metadata) or (each.id,) for each in questions}
    metrics = {
        measure: estimate(list(by_question.values()), [documents[name] for name in by_question])
        for measure, by_question in values.items()
    }
    if too_few := too_few_clusters(list(documents.values())):
        notes.append(f"no interval: {too_few}")
    if failures:
        reason = next(iter(failures.values()))
        notes.append(f"{len(failures):,} searches failed and count as empty results: {reason}")
    return IndexEvaluation(
        labels, depth, len(labelled.questions), metrics, values, documents, hits, failures, seconds,
        [*labelled.notes, *notes],
    )  # fmt: skip


def _measurable(labelled: LabelledQuestions, labels: Labels) -> tuple[list[Question], list[str]]:
    """The questions with the labels, and notes about the others."""
    if labels == "judgements":
        questions = [each for each in labelled.questions if relevant_of(labelled.judged.get(each.id, {}))]
        lack = "without a relevant passage"
    else:
        questions = [each for each in labelled.questions if findable(each.golden_answers)]
        lack = "without an answer that a passage could contain (no answer, or only yes or no)"
    if not questions:
        raise UserError(
            f"none of the {len(labelled.questions):,} questions can be measured: all are {lack}",
            hint="give judgements with --qrels, or questions with supporting_ids or golden_answers",
        )
    left_out = len(labelled.questions) - len(questions)
    return questions, [f"{left_out:,} questions left out: {lack}"] if left_out else []


def _lacking(index: Searchable, judged: Mapping[str, Mapping[str, int]]) -> list[str]:
    """A note about relevant passages that are not in the index. Raises UserError where none is."""
    if index.passages is None:
        return []
    relevant = {passage for grades in judged.values() for passage in relevant_of(grades)}
    absent = sorted(passage for passage in relevant if index.passages.row(passage) is None)
    if not absent:
        return []
    examples = ", ".join(absent[:3]) + (", …" if len(absent) > 3 else "")
    if len(absent) == len(relevant):
        raise UserError(
            f"none of the {len(relevant):,} relevant passages ({examples}) is in the index, whose ids are "
            f"like {index.passages[0].id!r}",
            hint="measure the index of the corpus that was judged, or add --answers",
        )
    return [f"{len(absent):,} of {len(relevant):,} relevant passages are not in the index ({examples})"]


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


@dataclass(frozen=True, slots=True)
class MeasureDiff:
    """One measure of A and of B over the same questions, and the test of B - A."""

    a: Estimate
    b: Estimate
    test: PairedTest
    better: int
    worse: int


@dataclass(frozen=True, slots=True)
class IndexComparison:
    """Index B beside index A on the same questions.

    `overlap` is the mean overlap of the first `OVERLAP_DEPTH` hits, `measures` are by name, and `changed`
    has the questions by how much their decisive measure changed: id, its values in A and B, the overlap.
    """

    overlap: Estimate
    measures: dict[str, MeasureDiff]
    changed: list[tuple[str, float, float, float]]


def compare_indexes(a: IndexEvaluation, b: IndexEvaluation) -> IndexComparison:
    """Compare two evaluations on the same questions by the same labels; passages are the same by their id.

    Both should be searched deeper than `OVERLAP_DEPTH`, to see ties at that cut.
    """
    clusters = list(a.documents.values())
    overlaps = {name: overlap_at(a.hits[name], b.hits[name], OVERLAP_DEPTH) for name in a.documents}
    measures = {}
    for name in a.values:
        before, after = ([side.values[name][question] for question in a.documents] for side in (a, b))
        measures[name] = MeasureDiff(
            a.metrics[name], b.metrics[name], paired_test(before, after, clusters),
            sum(new > old for old, new in zip(before, after, strict=True)),
            sum(new < old for old, new in zip(before, after, strict=True)),
        )  # fmt: skip
    old, new = a.values[DECISIVE[a.labels]], b.values[DECISIVE[b.labels]]
    changes = [(name, old[name], new[name], overlaps[name]) for name in a.documents]
    changes.sort(key=lambda row: (-abs(row[2] - row[1]), row[3]))
    return IndexComparison(estimate(list(overlaps.values()), clusters), measures, changes)
