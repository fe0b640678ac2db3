"""How many threads a run uses: the rule, what comes before it, and the cores there are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.tiny_models import tiny_model

from srl.config import Config, load_config
from srl.train import threads
from srl.train.threads import set_threads, threads_for, usable_cores


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def configured(*sets: str) -> Config:
    return load_config("tiny", sets=list(sets)).config


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [(700_000, 1), (8_000_000, 1), (20_000_000, 2), (134_000_000, 6), (None, 6)],
    ids=["the demo's", "one share", "two shares", "more than the cores", "on a GPU"],
)
def test_a_larger_model_has_more_threads_up_to_the_cores(monkeypatch, parameters, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "usable_cores", lambda: 6)
    assert threads_for(parameters, configured()) == expected


@pytest.mark.parametrize(
    ("sets", "asked", "expected"),
    [
        ([], "5,1", 5),
        ([], "many", 2),
        (["trainer.threads=3"], "5", 3),
        (["rollout.deterministic=true"], "5", 1),
        (["trainer.threads=3", "rollout.deterministic=true"], "5", 3),
    ],
)
def test_a_number_that_is_set_comes_before_the_rule(monkeypatch, sets, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    assert threads_for(10**9, configured(*sets)) == expected


def test_torch_uses_the_number(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 4)
    assert set_threads(tiny_model(), configured("trainer.threads=3")) == 3 == torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert set_threads(tiny_model(), configured()) == 1 == torch.get_num_threads()
    assert set_threads(tiny_model().to("meta"), configured()) == 4, "a model that is not on the CPU"


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """Four cores with two hardware threads each, of which the process may use the first three."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6}, raising=False)
    for cpu in range(8):
        write(
            tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list",
            f"{cpu % 4},{cpu % 4 + 4}\n",
        )
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 3), ("150000 100000", 2), ("10000 100000", 1)]
)
def test_quota_of_a_cgroup_counts(machine, limit, expected):
    write(machine / "proc/self/cgroup", "0::/slice/job\n")
    write(machine / "sys/fs/cgroup/slice/cpu.max", limit)
    write(machine / "sys/fs/cgroup/slice/job/cpu.max", "max 100000")
    assert usable_cores(machine) == expected
