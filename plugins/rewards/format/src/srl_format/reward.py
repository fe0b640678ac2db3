"""Search-R1's outcome reward with format scores (v0.3; arXiv 2505.15117)."""

from __future__ import annotations

from srl.answers import contains_answer, exact_match
from srl.trajectory import Score, Trajectory
from srl_format.options import Options
from srl_format.structure import is_well_formed


class FormatReward:
    """Exact match, softened by form: with s, f, r for the three options,

                 well-formed                       malformed
      correct    1                                 1 - s
      wrong      s (+ r if retrieved)              f
      none       s (+ r if retrieved)              0

    `retrieved`: a passage that a search of the episode returned holds a gold answer.
    """

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        return [self._score(trajectory) if trajectory.valid else Score(0.0) for trajectory in trajectories]

    def _score(self, trajectory: Trajectory) -> Score:
        golds = trajectory.question.golden_answers
        correct = exact_match(trajectory.answer, golds) == 1
        well_formed = is_well_formed(trajectory)
        retrieved = _retrieved(trajectory)
        value = self.value(correct, trajectory.answer is not None, well_formed, retrieved)
        return Score(value, {"correct": correct, "well_formed": well_formed, "retrieved": retrieved})

    def value(self, correct: bool, answered: bool, well_formed: bool, retrieved: bool) -> float:
        """The table above for one episode."""
        scores = self.options
        if correct:
            return 1.0 if well_formed else 1.0 - scores.structure_score
        if well_formed:
            return scores.structure_score + scores.retrieval_score * retrieved
        return scores.final_format_score if answered else 0.0


def _retrieved(trajectory: Trajectory) -> bool:
    golds = trajectory.question.golden_answers
    passages = (hit.passage for search in trajectory.searches for hit in search.hits)
    return any(contains_answer(passage.contents, golds) for passage in passages)
