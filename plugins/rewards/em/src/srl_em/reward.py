"""Exact match (Search-R1 v0.1 and v0.2)."""

from __future__ import annotations

from srl.answers import exact_match
from srl.trajectory import Score, Trajectory


class ExactMatch:
    """1 if the policy's answer equals a golden answer after normalisation, else 0."""

    def score(self, trajectories: list[Trajectory]) -> list[Score]:
        return [Score(_score(trajectory)) for trajectory in trajectories]


def _score(trajectory: Trajectory) -> float:
    return exact_match(trajectory.answer, trajectory.question.golden_answers) if trajectory.valid else 0.0
