"""The pieces of `bench/speed`: taking turns, merging, and a small run of every point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.speed.__main__ import POINTS
from bench.speed.harness import provenance, ratio
from bench.speed.step import SearchRollout

ROOT = Path(__file__).parent.parent


def test_ratio_is_the_median_of_ratios_within_a_round():
    theirs, ours = ([{"s": value} for value in row] for row in ((4.0, 90.0, 6.0), (2.0, 30.0, 2.0)))
    assert ratio(theirs, ours, "s") == 3.0  # of 2, 3 and 3; the medians alone would give 6 / 2


def test_equal_runs_write_equal_provenance():
    """No date and no directory of this machine."""
    found = provenance(["python bench/speed"], {"model_origin": "random", "data_origin": "world"})
    assert found == provenance(["python bench/speed"], {"model_origin": "random", "data_origin": "world"})
    assert str(ROOT) not in json.dumps(found)
    assert {"cores", "processor", "torch", "transformers"} <= found.keys()


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
