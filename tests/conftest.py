"""What all tests share: no network, one thread, a workspace of their own, and no silent skips in CI."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parent.parent
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's processes listen on 127.0.0.1
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",  # it would take the place of pyserini's JVM's
}

for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
# What is compiled is kept, whatever the environment says: rewriting asserts is half of collecting.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))  # so that `from tests.shared_data import …` works under any way to call pytest

NET = {
    "test_losses", "test_losses_gradients", "test_losses_oracles", "test_advantage_oracles",
    "test_answer_oracles", "test_kl", "test_logprobs", "test_optimiser", "test_packing",
    "test_block_attention", "test_intervals", "test_retrieval_metrics", "test_rm",
    "test_golden_answers", "test_data_published", "test_store_round_trip", "test_store_resume",
    "test_resume", "test_evaluation_kills", "test_injection", "test_reward_injection", "test_codec",
    "test_episode", "test_engine_contract", "test_odd_policies", "test_lora", "test_torch_engine_cache",
    "test_torch_engine_sampling", "test_vllm_engine", "test_verl_parity", "test_verl_patches",
    "test_bm25_formula", "test_bm25_kernel", "test_e5_oracles", "test_index_quality",
    "test_lucene_quality", "test_serve_clients", "test_defects", "test_policy_losses", "test_tags_unchanged",
}  # fmt: skip
"""Modules of tests that stay as they are when the code under them is rewritten (`pytest -m net`): oracles,
round trips, injection, resume, contracts, quality of retrieval, dialects of clients."""


def _unsynced(descriptor: int) -> None:
    """No test takes the power away, so none waits for the disk, which took a quarter of the time of runs."""
    os.fstat(descriptor)


os.fsync = _unsynced

# A machine with other work takes its time over an example.
settings.register_profile("patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """A background job or nohup has ctrl-C ignored, and `srl` keeps to that; tests that type it do not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "must_run: a skip of this test is a failure where CI=true")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for test in items:
        if test.path.stem in NET:
            test.add_marker("net")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    in_ci = os.environ.get("CI", "").lower() == "true"
    if in_ci and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("must_run"):
        report.outcome = "failed"
        reason = call.excinfo.value if call.excinfo else ""
        report.longrepr = f"{item.nodeid} must run in CI, and was skipped: {reason}"
    return report


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """A test draws the same numbers whatever ran before it in its process."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _spoken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that types -q leaves no other one quiet."""
    monkeypatch.setattr("srl.cli.output._quiet", False)
    yield
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("srl").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _plugin_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that loads a plugin of the current directory leaves it to no other one."""
    monkeypatch.setattr("srl.plugins.import_path._directories", [])
    monkeypatch.setattr("srl.plugins.import_path._used", [])


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace of this test's own, as `$SRL_WORKSPACE`; nothing is in it."""
    folder = tmp_path / "workspace"
    monkeypatch.setenv("SRL_WORKSPACE", str(folder))
    return folder
