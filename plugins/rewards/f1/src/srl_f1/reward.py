"""Word F1 (SQuAD)."""

from __future__ import annotations

from srl.answers import f1
from srl.trajectory import Score, Trajectory


class WordF1:
    """The best word F1 of the policy's answer against any golden answer; 0 without an answer."""

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        return [Score(_score(trajectory)) for trajectory in trajectories]


def _score(trajectory: Trajectory) -> float:
    return f1(trajectory.answer, trajectory.question.golden_answers) if trajectory.valid else 0.0
