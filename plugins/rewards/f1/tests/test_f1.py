"""The reward `f1` on hand-written trajectories."""

import pytest

from srl.testing import check_reward
from srl.trajectory import Question, Segment, Trajectory
from srl_f1.reward import WordF1


def trajectory(answer: str | None, end: str = "answered") -> Trajectory:
    question = Question("q", "Who wrote Yesterday?", ("Paul McCartney", "Lennon and McCartney"))
    segments = [Segment("prompt", (1,), "Who wrote Yesterday?", 0), Segment("policy", (2,), "…", 0, (-0.5,))]
    return Trajectory(question, segments, end=end, answer=answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Paul McCartney", 1.0), ("McCartney", 2 / 3), ("Lennon", 1 / 2), ("Ringo", 0.0), ("", 0.0),
        (None, 0.0),
    ],
)  # fmt: skip
def test_an_answer_scores_by_its_overlap_with_the_nearest_gold(answer: str | None, expected: float) -> None:
    assert [score.value for score in WordF1().score([trajectory(answer)])] == [pytest.approx(expected)]


def test_conforms_to_the_reward_seam() -> None:
    check_reward("f1")
