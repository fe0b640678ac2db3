"""What a process of a run on verl reports of itself, and what is made of reports that differ."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from srl.config import load_config
from srl.errors import UserError
from srl.train.verl import worker_check
from srl.train.verl.registration import WorkerReport
from srl.train.verl.worker_check import check_reports, check_search

MINE = WorkerReport(
    "node1",
    1,
    "3.11.7",
    {"verl": "0.9.1", "transformers": "5.10.4"},
    {"srl_ppo": "srl-search-gae 0.1.0"},
    ("one",),
)


def test_plugin_of_verl_does_nothing_outside_a_run(monkeypatch):
    monkeypatch.delenv("SRL_VERL_RUN", raising=False)
    code = "import sys, srl.train.verl.entry; print('verl' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_workers_that_are_alike_pass():
    check_reports({"rollout 0": replace(MINE, host="node2", pid=7), "training 0": MINE}, MINE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"versions": {"verl": "0.9.1", "transformers": "5.9.0"}},
            "has transformers 5.9.0, the trainer 5.10.4",
        ),
        ({"versions": {"verl": "0.9.1"}}, "has transformers nothing, the trainer 5.10.4"),
        ({"algorithms": {}}, "has srl_ppo nothing, the trainer srl-search-gae 0.1.0"),
        ({"algorithms": {**MINE.algorithms, "srl_x": "x 1"}}, "has srl_x x 1, the trainer nothing"),
        ({"python": "3.12.1"}, "runs Python 3.12.1, the trainer 3.11.7"),
        ({"patches": ()}, "has the patches ()"),
        ({"error": "ImportError: no plugin"}, "it failed to register: ImportError: no plugin"),
    ],
)
def test_worker_that_differs_is_named_with_what_differs(change, said):
    with pytest.raises(UserError, match=r"^worker rollout 3 on node7 differs") as caught:
        check_reports({"rollout 2": MINE, "rollout 3": replace(MINE, host="node7", **change)}, MINE)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", [None, ModuleNotFoundError("trace\nNo module named 'srl'")])
def test_worker_that_says_nothing_ends_the_run_by_name(found):
    with pytest.raises(UserError, match=r"^worker training 1 .*is srl-search installed there") as caught:
        check_reports({"training 1": found}, MINE)
    assert "\n" not in str(caught.value)


def test_replayed_searches_ask_no_server(monkeypatch, tmp_path):
    sets = ["search.url=http://127.0.0.1:9", "search.cassette=replay c"]
    monkeypatch.setattr(worker_check, "load_saved", lambda run: load_config(sets=sets).config)
    check_search(tmp_path, [object()])
    sets.pop()
    with pytest.raises(AttributeError, match="__ray_call__"):
        check_search(tmp_path, [object()])
