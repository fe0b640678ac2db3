"""A sample of a file's questions: the same each time, and of every data source in proportion."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srl.data.splits import proportional
from srl.errors import UserError
from srl.train.questions import stratified
from srl.trajectory import Question

CALMLY = settings(deadline=None, max_examples=200)


def questions(sources):
    return [Question(f"q{number}", f"question {number}", (), source) for number, source in enumerate(sources)]


@CALMLY
@given(st.integers(1, 300), st.data())
def test_of_one_source_the_draw_is_that_of_every_version_so_far(count, data):
    size = data.draw(st.integers(0, count))
    asked = questions(["nq"] * count)
    drawn = sorted(random.Random("the same questions each time").sample(range(count), size))
    assert stratified(asked, size) == [asked[position] for position in drawn]


def test_the_largest_remainders_are_rounded_up():
    """Hamilton's method by hand: 5.12, 2.56 and 2.32 of ten."""
    assert proportional({"a": 64, "b": 32, "c": 29}, 10) == {"a": 5, "b": 3, "c": 2}
    assert proportional({"b": 1, "a": 1}, 1) == {"b": 0, "a": 1}, "equal remainders by name"


def test_a_limit_by_source_draws_so_many_of_each_and_none_of_the_others():
    asked = questions(["nq"] * 20 + ["hotpotqa"] * 30 + ["2wiki"] * 5)
    drawn = stratified(asked, {"hotpotqa": 8, "2wiki": 9})
    assert Counter(item.data_source for item in drawn) == {"hotpotqa": 8, "2wiki": 5}
    assert (
        [item for item in asked if item in drawn] == drawn == stratified(asked, {"2wiki": 9, "hotpotqa": 8})
    )
    with pytest.raises(
        UserError, match=r"--limit squad=…: no question has this data source; there are 2wiki,"
    ):
        stratified(asked, {"squad": 1})
