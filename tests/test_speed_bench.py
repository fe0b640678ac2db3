"""The pieces of `bench/speed`: taking turns, merging, and a small run of every point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.speed.__main__ import POINTS
from bench.speed.harness import merged, provenance, ratio
from bench.speed.rollout import OBSERVATION_TOKENS, TURN_TOKENS, make_plans, written
from bench.speed.step import SearchRollout

ROOT = Path(__file__).parent.parent


def test_ratio_is_the_median_of_ratios_within_a_round():
    theirs, ours = ([{"s": value} for value in row] for row in ((4.0, 90.0, 6.0), (2.0, 30.0, 2.0)))
    assert ratio(theirs, ours, "s") == 3.0  # of 2, 3 and 3; the medians alone would give 6 / 2


def test_point_replaces_its_older_figures_as_a_whole():
    known = merged({}, "step", {"results": {"a": 1, "b": 2}})
    new = merged(merged(known, "update", {"results": {}}), "step", {"results": {"a": 3}})
    assert new == {"format": 1, "points": {"step": {"results": {"a": 3}}, "update": {"results": {}}}}


def test_equal_runs_write_equal_provenance():
    """No date and no directory of this machine."""
    found = provenance(["python bench/speed"], {"model_origin": "random", "data_origin": "world"})
    assert found == provenance(["python bench/speed"], {"model_origin": "random", "data_origin": "world"})
    assert str(ROOT) not in json.dumps(found)
    assert {"cores", "processor", "torch", "transformers"} <= found.keys()


@pytest.mark.parametrize("shape", ["real", "tiny"])
def test_plans_are_groups_of_one_prompt_and_within_their_lengths(shape):
    prompts, texts = [[1, 2], [3, 4, 5]], list(range(1000))
    plans = make_plans(shape, 7, prompts, texts, 16)
    assert plans == make_plans(shape, 7, prompts, texts, 16) != make_plans(shape, 8, prompts, texts, 16)
    assert len({tuple(plan.prompt) for plan in plans[:4]}) == 1
    for plan in plans:
        assert len(plan.observations) == len(plan.turns) - 1 >= 1
        assert all(length in range(*TURN_TOKENS[shape]) for length in plan.turns)
        assert all(len(read) in range(*OBSERVATION_TOKENS[shape]) for read in plan.observations)
    assert written(plans) == sum(sum(plan.turns) for plan in plans)


class OneToken:
    """A codec in which every letter is a token; EOS is 0, and so is the padding."""

    eos_ids = frozenset([0])

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_turn_of_trls_rollout_ends_at_its_tag_or_eos_and_not_at_its_padding():
    roll = SearchRollout.__new__(SearchRollout)
    roll.codec, roll.options = OneToken(), type("Options", (), {"stop": ("</a>",)})
    tag = [ord(letter) for letter in "x</a>"]
    assert roll._cut([*tag, 0, 0], 0) == tag
    assert roll._cut([120, 121, 0, 0], 0) == [120, 121, 0]
    assert roll._cut([120, 121], 0) == [120, 121]


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_every_point_runs_at_a_small_size(point):
    if point == "step":
        pytest.importorskip("trl")
    arguments = [sys.executable, "bench/speed", "--smoke", "--only", point, "--data", "none"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    report = done.stderr[done.stderr.rindex('\n{\n  "provenance"') :]
    assert json.loads(report)["results"]
