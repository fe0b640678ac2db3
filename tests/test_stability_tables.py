"""The tables of docs/stability.md: when validation fell, and which watch was first."""

from __future__ import annotations

import pytest
from bench.stability_tables import at_the_end, best_before, fell, first_watches, rolled_back


def run(val, begins=5, fired=()):
    names = ("step", "watch", "to_step")
    fired = [dict(zip(names, one, strict=True)) for one in fired]
    return {"val": dict(zip(("0", "2", "4", "6", "8"), val, strict=True)), "begins": begins, "fired": fired}


@pytest.mark.parametrize(
    ("val", "begins", "expected"),
    [
        ((0.4, 0.2, 0.5, 0.41, 0.3), 5, "8"),  # .41 is less than .1 below, .2 came before
        ((0.4, 0.2, 0.5, 0.41, 0.3), 1, "2"),
        ((0.4, 0.5, 0.5, 0.6, 0.49), 5, "8"),  # the best one may come after the fault began
        ((0.4, 0.5, 0.5, 0.6, 0.7), 5, "never"),
    ],
)
def test_a_fall_is_a_tenth_below_the_best_since_the_fault_began(val, begins, expected):
    assert fell(run(val, begins)) == expected


def test_the_best_before_the_fault_leaves_out_what_came_after():
    assert best_before(run((0.4, 0.2, 0.5, 0.9, 0.9))) == 0.5
    assert best_before(run((0.4, 0.2, 0.5, 0.9, 0.9), begins=1)) == 0.4


def test_the_first_watches_are_all_those_of_the_first_step():
    fired = [(4, "val_em", None), (4, "kl", 2), (6, "kl", 0), (4, "kl", 2)]
    assert first_watches(run((0.4,) * 5, fired=fired)) == "val_em, kl: 4"
    assert rolled_back(run((0.4,) * 5, fired=fired)) == "2, 0, 2"
    assert (first_watches(run((0.4,) * 5)), rolled_back(run((0.4,) * 5))) == ("none", "none")


def test_a_run_that_a_watch_stopped_says_after_which_validation():
    assert at_the_end({"exit": 0, "last": 0.25, "val": {"0": 0.5, "10": 0.25}}) == ".250"
    assert at_the_end({"exit": 2, "last": 0.25, "val": {"8": 0.5, "10": 0.25}}) == ".250, stopped at 10"
