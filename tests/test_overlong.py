"""Soft overlong punishment: DAPO's line, as a part of the reward of its own, the same as verl's."""

import asyncio

import pytest
from tests.rows import trajectory
from tests.training import config

from srl.errors import UserError
from srl.reward import Overlong, RewardMix
from srl.trajectory import Score

LINE = Overlong(longest=20, buffer=8, factor=0.5)


class PerTurn:
    def score(self, trajectories):
        return [Score(1.0, {}, (*[0.0] * (item.turns - 1), 1.0)) for item in trajectories]


def written(tokens):
    """An episode of three prompt tokens and, after them, this many: some the policy's, some read."""
    return trajectory("ppp" + "a" * (tokens - 4) + "ooo" + "a")


@pytest.mark.parametrize(("tokens", "expected"), [(5, 0), (12, 0), (14, -0.125), (16, -0.25), (20, -0.5)])
def test_the_line_of_eq_13(tokens, expected):
    assert LINE(written(tokens)) == pytest.approx(expected)
    verl = min(-(tokens - (20 - 8)) / 8 * 0.5, 0)
    assert LINE(written(tokens)) == pytest.approx(verl)


def test_beyond_the_limit_it_does_not_grow():
    assert LINE(written(40)) == -0.5


def test_it_is_a_part_of_its_own_in_the_last_turn():
    mix = RewardMix({"one": 2.0}, plugins={"one": PerTurn()}, overlong=LINE)
    lost = trajectory("pp" + "a" * 30, failed=True)
    score, zero = asyncio.run(mix.score([written(16), lost]))
    assert score.value == pytest.approx(1.75)
    assert score.parts == {"one": 1.0, "overlong": -0.25}
    assert score.per_turn == pytest.approx((0.0, 1.75))
    assert (zero.value, zero.parts) == (0.0, {"one": 0.0, "overlong": 0.0})


def test_a_buffer_longer_than_the_limit_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"overlong_buffer\.len = 256 .*max_response_length = 128"):
        config(tmp_path, "grpo", reward__overlong_buffer={"enable": True})
