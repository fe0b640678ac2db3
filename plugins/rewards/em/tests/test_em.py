"""The reward `em` on hand-written trajectories."""

import pytest

from srl.testing import check_reward
from srl.trajectory import Question, Segment, Trajectory
from srl_em.reward import ExactMatch


def trajectory(answer: str | None, text: str = "", end: str = "answered") -> Trajectory:
    question = Question("q", "Capital of China?", ("Beijing", "Peking"))
    segments = [
        Segment("prompt", (1,), "For example, <answer> Beijing </answer>. Question: Capital of China?", 0),
        Segment("policy", (2,), text, 0, (-0.5,)),
    ]
    return Trajectory(question, segments, end=end, answer=answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("the Beijing.", 1.0), ("peking", 1.0), ("Beijing city", 0.0), ("", 0.0), (None, 0.0)],
)
def test_an_answer_scores_by_normalised_equality(answer: str | None, expected: float) -> None:
    assert [score.value for score in ExactMatch().score([trajectory(answer)])] == [expected]


def test_conforms_to_the_reward_seam() -> None:
    check_reward("em")
