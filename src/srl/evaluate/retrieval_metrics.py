"""Retrieval metrics: recall@k, nDCG@10, MRR and MAP of rankings.

A ranking is a list of passage ids, best first. Judged passages have a grade; a passage without a grade, or
with one below 1, is not relevant. The measures are those of `trec_eval`, computed by `ir_measures`:

    recall@k   the share of a question's relevant passages that are among the first k
    nDCG@10    the gains of the first ten, discounted by rank, over those of the best possible order:
               Σ_i grade_i / log2(i + 1); Järvelin and Kekäläinen (2002), with linear gains
    MRR        1 / the rank of the first relevant passage, 0 if there is none
    MAP        the mean, over a question's relevant passages, of the precision at the rank of each
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from srl.evaluate.intervals import imported
from srl.trajectory import Question

DEPTHS = (1, 3, 5, 10, 100)
Rankings = Mapping[str, Sequence[str]]
Judged = Mapping[str, Mapping[str, int]]


def ranking_measures(
    rankings: Rankings, judged: Judged, depths: Sequence[int] = DEPTHS
) -> dict[str, dict[str, float]]:
    """`{measure: {question: value}}` for every question that has a relevant passage.

    A question without a ranking has the value 0 in all. A repeated passage counts at its first rank. Raises
    UserError where `ir_measures` is not installed.
    """
    library = imported("ir_measures")
    names = {library.R @ depth: f"recall@{depth}" for depth in depths}
    names |= {library.nDCG @ 10: "nDCG@10", library.RR: "MRR", library.AP: "MAP"}
    questions = [question for question in judged if relevant_of(judged[question])]
    values = {name: dict.fromkeys(questions, 0.0) for name in names.values()}
    grades = {question: dict(judged[question]) for question in questions}
    run = {question: _scores(rankings.get(question, ())) for question in questions}
    for metric in library.iter_calc(list(names), grades, run):
        values[names[metric.measure]][metric.query_id] = float(metric.value)
    return values


def answer_measures(
    ranks: Mapping[str, int | None], depths: Sequence[int] = DEPTHS
) -> dict[str, dict[str, float]]:
    """The same for questions with known answers only; `ranks` are of the first passage with an answer.

    `answer recall@k` is 1 where one of the first k contains a golden answer (the top-k accuracy of
    Karpukhin et al., 2020), `answer MRR` is 1 / its rank. Such a passage may be about something else.
    """
    measures = {
        f"answer recall@{depth}": {
            name: float(rank is not None and rank <= depth) for name, rank in ranks.items()
        }
        for depth in depths
    }
    measures["answer MRR"] = {name: 1 / rank if rank else 0.0 for name, rank in ranks.items()}
    return measures


def relevant_of(grades: Mapping[str, int]) -> list[str]:
    """The passages that are relevant: those of grade 1 and above."""
    return [passage for passage, grade in grades.items() if grade >= 1]


def _scores(ranking: Sequence[str]) -> dict[str, float]:
    """Scores that decrease with rank, since `trec_eval` sorts by score and breaks ties by id."""
    scores: dict[str, float] = {}
    for position, passage in enumerate(ranking):
        scores.setdefault(passage, float(len(ranking) - position))
    return scores


def supporting_ids(question: Question) -> frozenset[str]:
    """The ids of the passages that contain the answer (metadata `supporting_ids`), as strings."""
    return frozenset(str(passage) for passage in question.metadata.get("supporting_ids") or ())


def document_of(metadata: Mapping[str, Any]) -> str:
    """The document that a question was written from: `document`, or the first of its `supporting_titles`.

    That is the article of SQuAD, the page of NQ and PopQA, and of questions that combine several pages
    (HotpotQA, 2WikiMultihopQA, MuSiQue) the first; empty if unknown. Questions from one document are right
    or wrong together, which an interval has to know.
    """
    titles = metadata.get("supporting_titles")
    first = titles[0] if isinstance(titles, list | tuple) and titles else ""
    return str(metadata.get("document") or first)


def recall_at_k(ranked: Sequence[str], relevant: Collection[str], k: int | None = None) -> float:
    """The share of the `relevant` ids among the first `k` of `ranked` (None: all of them)."""
    return len(set(ranked[:k]) & set(relevant)) / len(set(relevant))
