"""What a process of a run on verl reports of itself, and what is made of reports that differ."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from srl.advantage import Advantages, Algorithm
from srl.errors import UserError
from srl.train.verl.register import Report, check_reports, for_verl

MINE = Report(
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
            "has transformers 5.9.0, and the trainer 5.10.4",
        ),
        ({"versions": {"verl": "0.9.1"}}, "has transformers nothing, and the trainer 5.10.4"),
        ({"algorithms": {}}, "has srl_ppo nothing, and the trainer srl-search-gae 0.1.0"),
        ({"algorithms": {**MINE.algorithms, "srl_x": "x 1"}}, "has srl_x x 1, and the trainer nothing"),
        ({"python": "3.12.1"}, "runs Python 3.12.1, and the trainer 3.11.7"),
        ({"patches": ()}, "patched ()"),
        ({"error": "ImportError: no plugin"}, "it failed to register: ImportError: no plugin"),
    ],
)
def test_worker_that_differs_is_named_with_what_differs(change, said):
    with pytest.raises(UserError, match="the worker rollout 3 on node7") as caught:
        check_reports({"rollout 2": MINE, "rollout 3": replace(MINE, host="node7", **change)}, MINE)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("found", [None, ModuleNotFoundError("trace\nNo module named 'srl'")])
def test_worker_that_says_nothing_ends_the_run_by_name(found):
    with pytest.raises(UserError, match=r"the worker training 1 .*is srl-search installed there") as caught:
        check_reports({"training 1": found}, MINE)
    assert "\n" not in str(caught.value)


def algorithm(needs_critic):
    """An estimator that gives back what it was called with."""
    seen = {}

    def estimate(**given):
        seen.update(given)
        return Advantages(given["token_level_rewards"], given["token_level_rewards"])

    return Algorithm("mine", estimate, needs_critic), seen


def test_estimator_gets_values_validity_and_groups_under_verls_keywords():
    made, seen = algorithm(needs_critic=True)
    rewards, mask, values = torch.ones(3, 2), torch.tensor([[1, 1], [1, 0], [0, 0]]), torch.zeros(3, 2)
    for_verl(made)(
        rewards, mask, {"gamma": 0.9, "lam": 0.8}, ["b", "a", "b"],
        values=values, valid=torch.tensor([True, False, False]), group_size=2,
    )  # fmt: skip
    assert seen["group_ids"].tolist() == [0, 1, 0]
    assert seen["valid"].tolist() == [True, False, False]
    assert (seen["gamma"], seen["lam"], seen["group_size"]) == (0.9, 0.8, 2)
    assert seen["values"] is values


def test_estimator_with_a_critic_refuses_to_run_without_values():
    made, _ = algorithm(needs_critic=True)
    with pytest.raises(UserError, match="srl train --backend verl"):
        for_verl(made)(torch.ones(1, 2), torch.ones(1, 2), {}, ["a"])


def test_rows_without_a_policy_token_are_out_where_verl_says_nothing_of_validity():
    made, seen = algorithm(needs_critic=False)
    for_verl(made)(torch.ones(2, 2), torch.tensor([[1, 0], [0, 0]]), {}, ["a", "a"])
    assert seen["valid"].tolist() == [True, False]
