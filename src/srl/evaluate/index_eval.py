"""Evaluating an index: search for every question, and compare the hits with the relevance judgements."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal, Protocol

from srl.answers import contains_answer, findable
from srl.data.relevance import LabelledQuestions
from srl.errors import UserError
from srl.evaluate.intervals import MIN_CLUSTERS, ClusterSums, Estimate, estimate
from srl.evaluate.retrieval_metrics import (
    DEPTHS,
    answer_measures,
    document_of,
    ranking_measures,
    relevant_of,
)
from srl.trajectory import Hit, Passage, Question

Labels = Literal["judgements", "answers"]
_ASKED_AT_ONCE = 256
_NDCG_DEPTH = 10


class Searchable(Protocol):
    """An open index, or a served one; `passages` is None where the passages are not at hand."""

    passages: Any

    def outcomes(self, queries: list[str], k: int) -> list[Any]: ...


@dataclass(frozen=True, slots=True)
class SearchResults:
    """The hits of each question, by its id, without the passages themselves.

    `hits` are ids and scores, best first; none where the search failed, with the reason in `failures`.
    `answer_ranks` are the ranks of the first passage with a golden answer, where these were asked for, and
    `passages` its first passages, where these were asked for.
    """

    hits: Mapping[str, list[tuple[str, float]]]
    failures: Mapping[str, str]
    seconds: float
    answer_ranks: Mapping[str, int | None] = field(default_factory=dict)
    passages: Mapping[str, list[Passage]] = field(default_factory=dict)

    def rankings(self) -> dict[str, list[str]]:
        """The ids of the hits, best first."""
        return {name: [passage for passage, _ in hits] for name, hits in self.hits.items()}


@dataclass(frozen=True, slots=True)
class IndexEvaluation:
    """The evaluation of an index: `metrics` over all questions, `values` of each, and notes for the user."""

    labels: Labels
    depth: int
    asked: int
    metrics: dict[str, Estimate]
    values: dict[str, dict[str, float]]
    searched: SearchResults
    notes: list[str] = field(default_factory=list)

    @property
    def measured(self) -> int:
        return len(next(iter(self.values.values())))

    @property
    def failed(self) -> int:
        return len(self.searched.failures)

    def of_question(self, name: str) -> dict[str, float]:
        """The measures of one question; none where it was not measured."""
        return {measure: values[name] for measure, values in self.values.items() if name in values}


def search_all(
    index: Searchable,
    questions: Sequence[Question],
    depth: int,
    progress: Callable[[int], None] | None = None,
    for_answers: bool = False,
    keep: int = 0,
) -> SearchResults:
    """Search the first `depth` hits of every question; `for_answers`, also the rank of the first answer.

    The passages of the first `keep` hits of each are kept. A failed search has no hits, and its reason is
    kept.
    """
    hits: dict[str, list[tuple[str, float]]] = {}
    failures: dict[str, str] = {}
    ranks: dict[str, int | None] = {}
    passages: dict[str, list[Passage]] = {}
    began = perf_counter()
    for start in range(0, len(questions), _ASKED_AT_ONCE):
        batch = questions[start : start + _ASKED_AT_ONCE]
        outcomes = index.outcomes([question.text for question in batch], depth)
        for question, outcome in zip(batch, outcomes, strict=True):
            _take(hits, failures, ranks if for_answers else None, question, outcome)
            if keep:
                first = [] if isinstance(outcome, Exception) else outcome[:keep]
                passages[question.id] = [hit.passage for hit in first]
        if progress is not None:
            progress(start + len(batch))
    return SearchResults(hits, failures, perf_counter() - began, ranks, passages)


def _take(
    hits: dict[str, list[tuple[str, float]]],
    failures: dict[str, str],
    ranks: dict[str, int | None] | None,
    question: Question,
    outcome: list[Hit] | Exception,
) -> None:
    """Keep ids and scores of one question's hits, and the rank of the first answer."""
    if isinstance(outcome, Exception):
        failures[question.id] = str(outcome)
    found: list[Hit] = [] if isinstance(outcome, Exception) else outcome
    hits[question.id] = [(hit.passage.id, hit.score) for hit in found]
    if ranks is not None:
        ranks[question.id] = _first_with_answer(found, question.golden_answers)


def evaluate_index(
    index: Searchable,
    labelled: LabelledQuestions,
    depths: Sequence[int] = DEPTHS,
    labels: Labels | None = None,
    progress: Callable[[int], None] | None = None,
) -> IndexEvaluation:
    """Evaluate `index` on labelled questions, by relevance judgements or by answers in the passages.

    Without `labels`, judgements are used where there are any. A failed search counts as nothing found.
    Raises UserError where there are neither judgements nor answers, or where the index has none of the
    relevant passages.
    """
    labels = labels or ("judgements" if labelled.judged else "answers")
    questions, notes = measurable(labelled, labels)
    if labels == "judgements":
        notes += _absent(index, labelled, questions)
    depth = max(*depths, _NDCG_DEPTH)
    searched = search_all(index, questions, depth, progress, labels == "answers")
    values = measure(searched, questions, labelled, labels, depths)
    documents = documents_of(questions)
    metrics = {
        name: estimate(list(of.values()), [documents[one] for one in of]) for name, of in values.items()
    }
    if labels == "judgements" and index.passages is None:
        notes += _strangers(searched, labelled)
    notes = [*labelled.notes, *notes, *too_few_documents(documents), *_failures(searched)]
    return IndexEvaluation(labels, depth, len(labelled.questions), metrics, values, searched, notes)


def documents_of(questions: Iterable[Question]) -> dict[str, Hashable]:
    """For each question, by its id, the document that it was written from, else the question itself.

    Questions from one document are found or missed together, which intervals and tests have to know.
    """
    return {each.id: document_of(each.metadata) or (each.id,) for each in questions}


def too_few_documents(documents: Mapping[str, Hashable]) -> list[str]:
    """A note where the questions are from too few documents for an interval."""
    found = ClusterSums.of([0.0] * len(documents), list(documents.values()))
    if found.independent or found.effective >= MIN_CLUSTERS:
        return []
    return [
        f"no interval: {len(documents):,} questions from {len(found.sizes):,} documents, which count as "
        f"{found.effective:.0f} of equal size, and an interval needs {MIN_CLUSTERS}"
    ]


def measure(
    searched: SearchResults,
    questions: Sequence[Question],
    labelled: LabelledQuestions,
    labels: Labels,
    depths: Sequence[int] = DEPTHS,
) -> dict[str, dict[str, float]]:
    """`{measure: {question: value}}` of these questions, all of which were searched."""
    names = [question.id for question in questions]
    if labels == "answers":
        return answer_measures({name: searched.answer_ranks[name] for name in names}, depths)
    return ranking_measures(searched.rankings(), {name: labelled.judged[name] for name in names}, depths)


def measurable(labelled: LabelledQuestions, labels: Labels) -> tuple[list[Question], list[str]]:
    """The questions with the labels, and notes about the others."""
    if labels == "judgements":
        known = [each for each in labelled.questions if relevant_of(labelled.judged.get(each.id, {}))]
        lacking = "without a relevant passage"
    else:
        known = [each for each in labelled.questions if _asks_for_text(each)]
        lacking = "without an answer that a passage could contain (no answer, or only yes or no)"
    if not known:
        raise UserError(
            f"none of the {len(labelled.questions):,} questions can be measured: all are {lacking}; "
            "give judgements with --qrels, or questions with supporting_ids or golden_answers"
        )
    left_out = len(labelled.questions) - len(known)
    return known, [f"{left_out:,} questions left out: {lacking}"] if left_out else []


def _asks_for_text(question: Question) -> bool:
    return bool(findable(question.golden_answers))


def _absent(index: Searchable, labelled: LabelledQuestions, questions: Sequence[Question]) -> list[str]:
    """A note about relevant passages that are not in the index. Raises UserError where none is."""
    relevant, absent = lacking(index, labelled, questions)
    if not absent:
        return []
    if len(absent) == len(relevant):
        raise UserError(
            f"none of the {len(relevant):,} relevant passages ({_some(relevant)}) is in the index, whose ids "
            f"are like {index.passages[0].id!r}; measure the index of the corpus that was judged, or look "
            "for the answers in the passages with --answers"
        )
    return [
        f"{len(absent):,} of {len(relevant):,} relevant passages are not in the index ({_some(absent)}); "
        "they count as not found"
    ]


def lacking(
    index: Searchable, labelled: LabelledQuestions, questions: Sequence[Question]
) -> tuple[set[str], set[str]]:
    """The relevant passages of these questions, and those that are known not to be in the index."""
    relevant = {name for each in questions for name in relevant_of(labelled.judged[each.id])}
    if index.passages is None:
        return relevant, set()
    return relevant, {name for name in relevant if index.passages.row(name) is None}


def _strangers(searched: SearchResults, labelled: LabelledQuestions) -> list[str]:
    """A note where no hit of any question was judged, since the ids may differ."""
    if any(not labelled.judged[name].keys().isdisjoint(found) for name, found in searched.rankings().items()):
        return []
    return ["no hit of any question was judged, relevant or not: are the ids those of the judgements?"]


def _failures(searched: SearchResults) -> list[str]:
    if not searched.failures:
        return []
    first = next(iter(searched.failures.values()))
    return [f"{len(searched.failures):,} searches failed and count as empty results: {first}"]


def _first_with_answer(hits: Sequence[Hit], golds: Sequence[str]) -> int | None:
    """The rank, from 1, of the first passage that contains a golden answer."""
    ranks = (rank for rank, hit in enumerate(hits, 1) if contains_answer(hit.passage.contents, golds))
    return next(ranks, None)


def _some(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
