"""An evaluation that is killed at random moments."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.evaluation_kills import KILLED_QUESTIONS, killed, never_killed, write_place

pytest.importorskip("srl_bm25")


@pytest.mark.slow
def test_an_evaluation_that_is_killed_gives_the_same_table_and_generates_nothing_again(
    tmp_path: Path,
) -> None:
    write_place(tmp_path, KILLED_QUESTIONS)
    expected = never_killed(tmp_path)
    assert expected["metrics"]["em"] == sum(number % 3 == 0 for number in range(400)) / 400
    assert killed(tmp_path, expected, 3, random.Random(0), 0.02) == []
