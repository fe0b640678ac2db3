"""Retrieval credit: each search is paid for the gold passages that it shows first."""

from __future__ import annotations

from srl.evaluate.episode_results import evidence_recall
from srl.trajectory import Passage, Question, Score, Search, Trajectory


class Evidence:
    """The share of the question's gold passages that the policy's searches showed it, 0 to 1, by turns.

    A turn gets the share that its search was the first to show; what the prompt showed belongs to no turn.
    Of a question that names no gold passages the value is 0, and so is the part `known`.
    """

    def applies(self, question: Question) -> bool:
        """Whether the question names gold passages."""
        return evidence_recall(question, (), ()) is not None

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        return [_score(trajectory) if trajectory.valid else Score(0.0) for trajectory in trajectories]


def _score(trajectory: Trajectory) -> Score:
    if evidence_recall(trajectory.question, (), ()) is None:
        return Score(0.0, {"known": 0.0})
    turns = [segment.turn for segment in trajectory.segments if segment.is_policy]
    credit, passages, before = dict.fromkeys(turns, 0.0), list[Passage](), 0.0
    own = _own_searches(trajectory)
    for search in trajectory.searches:
        passages += [hit.passage for hit in search.shown_hits]
        ids, titles = {passage.id for passage in passages}, {passage.title for passage in passages}
        recall = max(before, evidence_recall(trajectory.question, ids, titles) or 0.0)
        if own.get(search.turn) is search:
            credit[search.turn] += recall - before
        before = recall
    per_turn = tuple(credit[turn] for turn in turns)
    return Score(sum(per_turn), {"known": 1.0}, per_turn)


def _own_searches(trajectory: Trajectory) -> dict[int, Search]:
    """The policy's searches by turn; a template's own for the prompt comes before that of turn 0."""
    observed = {segment.turn for segment in trajectory.segments if segment.kind == "observation"}
    return {search.turn: search for search in trajectory.searches if search.turn in observed}
