"""Search-R1's outcome reward with format scores (v0.3; arXiv 2505.15117)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from srl.answers import contains_answer, exact_match
from srl.trajectory import Score, Trajectory
from srl_format.structure import is_well_formed


class Options(BaseModel):
    """The three scores of the scheme; the defaults are those of Search-R1's v0.3 scripts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    structure_score: float = Field(default=0.2, ge=0, le=1)
    """Score of a well-formed episode with a wrong answer; also the deduction if a right one is malformed."""
    final_format_score: float = Field(default=0.1, ge=0, le=1)
    """Score of a malformed episode with a wrong answer between answer tags."""
    retrieval_score: float = Field(default=0.0, ge=0, le=1)
    """Added to `structure_score` if the answer is wrong but a passage that was shown has a golden one."""


class FormatReward:
    """Exact match with scores for the format; s, f and r are the three options:

                 well-formed                       malformed
      correct    1                                 1 - s
      wrong      s (+ r if retrieved)              f
      none       s (+ r if retrieved)              0

    `retrieved`: a passage that the policy was shown contains a golden answer. What did not fit into an
    observation was not shown.
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
    texts = (text for search in trajectory.searches for text in search.shown_texts)
    return any(contains_answer(text, golds) for text in texts)
