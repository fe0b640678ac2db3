"""The pieces of `bench/speed`: taking turns, merging, and a small run of every point."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench.speed.__main__ import POINTS
from bench.speed.harness import ratio

ROOT = Path(__file__).parent.parent


def test_ratio_is_the_median_of_ratios_within_a_round():
    theirs, ours = ([{"seconds": value} for value in row] for row in ((4.0, 90.0, 6.0), (2.0, 30.0, 2.0)))
    assert ratio(theirs, ours) == 3.0  # of 2, 3 and 3; the medians alone would give 6 / 2


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
