"""The arithmetic of docs/scale.md: what follows from what, by hand, and the figures are those of the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from bench.scale import (
    PARAMETERS,
    RESULT,
    WIKI,
    Episodes,
    Machine,
    Measured,
    computed,
    fsdp_bytes,
    link_seconds,
    search_cost,
    search_servers,
    seconds,
)

ROOT = Path(__file__).parent.parent
MEASURED = Measured(
    search_s=0.002,
    http_s=0.0004,
    flat_s=0.1,
    search_bytes=2600,
    log_bytes=6000,
    sent_bytes=40000,
    write_s=0.001,
)
SEVEN = PARAMETERS["7B"]


def test_results_follow_from_their_constants():
    """Whoever changes the arithmetic runs `python bench/scale.py`."""
    saved = json.loads(RESULT.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(computed(Measured(**saved["measured"])))) == saved


def test_tables_of_the_pages_are_those_of_the_results():
    checked = subprocess.run([sys.executable, "bench/readme.py", "--check"], cwd=ROOT, check=False)
    assert checked.returncode == 0, "run: make docs"


def test_forward_and_backward_cost_what_their_products_cost():
    """Two operations a parameter and token forward, twice that backward, once more to recompute."""
    machine = replace(Machine(), flops=1e15, mfu=0.5)
    episodes = replace(Episodes(), count=1000, prompt=100, written=400, searches=1, observation=500)
    step = seconds("7B", 8, 1000, machine, episodes)
    once = 2 * SEVEN * 1_000_000 / (8 * 0.5e15)
    assert step["update"] == pytest.approx(4 * once)
    assert step["log_probs"] == pytest.approx(2 * once)
    assert step["rollout"] == pytest.approx(1000 * 400 / (8 * 1000) + 0.6 * once)


def test_rollout_is_never_shorter_than_its_longest_episode():
    episodes = Episodes()
    lasts = [seconds("7B", gpus, 5000, Machine(), episodes)["rollout"] for gpus in (64, 640, 6400)]
    assert lasts[0] > lasts[1] > lasts[2] > episodes.longest * 0.010
    assert lasts[2] == pytest.approx(episodes.longest * 0.010, rel=0.01)


def test_gathers_are_counted_for_each_pass():
    """Two passes for log-probs, then forward, backward and reduction of each of eight mini-batches."""
    few = replace(Episodes(), count=64, minis=8)
    assert fsdp_bytes(SEVEN, 64, few) == SEVEN * (2 * 2 + 8 * (2 + 2 + 4))
    long = replace(few, micro=int(few.tokens) // 2)
    assert fsdp_bytes(SEVEN, 64, long) == SEVEN * (2 * 2 * 2 + 8 * (2 + 2 + 4))


def test_one_machine_has_no_network():
    assert link_seconds(SEVEN, 8, Machine(), Episodes())["network"] == 0
    assert link_seconds(SEVEN, 16, Machine(), Episodes())["network"] > 0


def test_search_grows_with_the_corpus_and_http_does_not():
    assert search_cost(MEASURED, 5_000_000) == pytest.approx(0.0024)
    assert search_cost(MEASURED) == pytest.approx(0.002 * WIKI / 5e6 + 0.0004)


def test_servers_are_planned_for_the_peak_and_not_to_their_last_core():
    found = search_servers(100, MEASURED)
    assert found["peak_per_s"] == 300
    assert found["bm25_cores"] == pytest.approx(300 * search_cost(MEASURED) / 0.7, abs=0.1)
