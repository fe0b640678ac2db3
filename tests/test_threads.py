"""How many threads a run uses: the choice among measured times, the trial of a model, the cores there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny_models import tiny_model

from srl.config import Config, load_config
from srl.train import threads
from srl.train.threads import (
    Trial,
    choose_threads,
    choose_threads_for,
    fewest_fast,
    median_seconds,
    thread_counts,
    try_threads,
    usable_cores,
)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class FakeClock:
    """A clock that only `work` moves, by what it costs with the current number of threads."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.now, self.cost, self.calls = 0.0, cost, list[int]()

    def __call__(self) -> float:
        return self.now

    def work(self) -> None:
        self.calls.append(torch.get_num_threads())
        self.now += self.cost(torch.get_num_threads())


def configured(*sets: str) -> Config:
    return load_config("tiny", sets=list(sets)).config


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({1: 2.0, 2: 1.0}, 2),
        ({1: 1.05, 2: 1.0}, 1),
        ({1: 1.0, 2: 9.0}, 1),
        ({1: 8.0, 2: 4.0, 4: 3.9, 6: 2.0}, 6),
        ({1: 8.0, 2: 4.0, 4: 2.0, 6: 1.9}, 4),
        ({6: 1.0}, 6),
    ],
)
def test_more_threads_are_taken_where_they_are_clearly_faster(costs, chosen):
    assert fewest_fast(costs) == chosen


@pytest.mark.parametrize("seconds", [1e-4, 0.05, 30.0])
def test_times_are_medians_and_the_trial_is_short(seconds):
    turn = iter(range(10**6))

    def cost(count: int) -> float:
        return (3 if next(turn) == 3 else 1) * seconds / count  # one call meets other load

    torch.set_num_threads(1)
    clock = FakeClock(cost)
    found = median_seconds(clock.work, [1, 2], clock)
    if seconds < 1:
        assert found == pytest.approx({1: seconds, 2: seconds / 2})
        assert clock.now < 1.0
    else:
        assert clock.calls == [1, 1, 2], "slow work has one turn for each number, after a first call"


@pytest.mark.parametrize("unit", [0.1, 1e-3])
def test_threads_that_wait_for_each_other_end_the_trial(unit):
    clock = FakeClock(lambda count: {1: 1.0, 2: 0.4, 4: 200.0}[count] * unit)
    found = median_seconds(clock.work, [1, 2, 4, 8], clock)
    assert found == pytest.approx({1: unit, 2: 0.4 * unit, 4: 200 * unit})
    assert clock.calls.count(4) == 1


class FakeModel(torch.nn.Module):
    """A model whose passes only move its clock: each costs by the number of threads and its length."""

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        super().__init__()
        self.clock, self.made = (
            FakeClock(lambda count: cost(count, self.made[-1][1])),
            list[tuple[int, ...]](),
        )

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, use_cache: bool) -> None:
        self.made.append(tuple(input_ids.shape))
        self.clock.work()


def tried(cost: Callable[[int, int], float], rows: int) -> tuple[Trial, set[tuple[int, ...]]]:
    """The trial with 1 and 2 threads of a model with these costs, and the passes it made."""
    model: Any = FakeModel(cost)
    found = try_threads(model, rows, [1, 2], model.clock)
    assert len(model.made) < 150
    return found, set(model.made)


def test_the_model_itself_is_tried():
    """Here decoding is twice as fast with two threads, and longer passes are slower."""
    found, made = tried(lambda count, length: 0.02 / count if length == 1 else 0.02 * count, rows=4)
    assert made == {(4, 1), (8, 16)}
    assert found.decode_s == pytest.approx({1: 0.02, 2: 0.01})
    assert found.forward_s == pytest.approx({1: 0.02, 2: 0.04})
    assert found.costs(0) == pytest.approx({1: 0.005, 2: 0.0025})
    assert found.costs(64) == pytest.approx({1: 0.015, 2: 0.0225})


def test_a_large_model_is_tried_with_decode_steps_alone():
    found, made = tried(lambda count, length: 2.0 / count, rows=4)
    assert made == {(4, 1)}
    assert found.forward_s == {}
    assert found.costs(5) == pytest.approx({1: 0.5, 2: 0.25})


def test_a_number_that_was_hopeless_is_not_chosen():
    found, _ = tried(lambda count, length: 0.02 * (count if length == 1 else count**5), rows=8)
    assert set(found.costs(1)) == {1, 2}
    assert fewest_fast(found.costs(1)) == 1


def test_any_causal_language_model_can_be_tried():
    found = try_threads(tiny_model(), 2, [1], time.perf_counter)
    assert min(found.decode_s[1], found.forward_s[1]) > 0


def test_chosen_number_and_times_are_reported(monkeypatch):
    trial = Trial(8, {1: 0.031, 2: 0.017}, 128, {1: 0.2104, 2: 0.118})
    monkeypatch.setattr(threads, "try_threads", lambda *_: trial)
    monkeypatch.setattr(threads, "usable_cores", lambda: 2)
    said: list[str] = []
    assert choose_threads(tiny_model(), configured(), 5, said.append) == 2 == torch.get_num_threads()
    assert said == [
        "2 threads: a decode step of 8 episodes took 31 ms with 1, 17 with 2, a forward pass of 128 tokens "
        "210 ms with 1, 118 with 2"
    ]


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["trainer.threads=3"], 3),
        (["rollout.deterministic=true"], 1),
        (["trainer.threads=3", "rollout.deterministic=true"], 3),
    ],
)
def test_a_number_that_is_set_or_a_deterministic_run_needs_no_trial(monkeypatch, sets, expected):
    monkeypatch.setattr(threads, "median_seconds", None)
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    assert choose_threads(tiny_model(), configured(*sets), 5, lambda text: None) == expected
    assert choose_threads_for(lambda: None, configured(*sets)) == expected == torch.get_num_threads()


def test_one_core_and_a_gpu_need_no_trial(monkeypatch):
    monkeypatch.setattr(threads, "try_threads", None)
    monkeypatch.setattr(threads, "usable_cores", lambda: 1)
    assert choose_threads(tiny_model(), configured(), 5, lambda text: None) == 1
    monkeypatch.setattr(threads, "usable_cores", lambda: 3)
    assert choose_threads(tiny_model().to("meta"), configured(), 5, lambda text: None) == 3


def test_candidates_are_powers_of_two_and_all_cores():
    assert [thread_counts(cores) for cores in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """Four cores with two hardware threads each, of which the process may use the first three."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
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


def test_hardware_threads_of_a_core_count_once(machine):
    assert usable_cores(machine) == 3


@pytest.mark.parametrize(
    ("limit", "expected"), [("max 100000", 3), ("150000 100000", 2), ("10000 100000", 1)]
)
def test_quota_of_a_cgroup_counts(machine, limit, expected):
    write(machine / "proc/self/cgroup", "0::/slice/job\n")
    write(machine / "sys/fs/cgroup/slice/cpu.max", limit)
    write(machine / "sys/fs/cgroup/slice/job/cpu.max", "max 100000")
    assert usable_cores(machine) == expected


def test_quota_of_an_old_cgroup_counts(machine):
    write(machine / "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1")
    write(machine / "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
    write(machine / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "200000")
    write(machine / "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    assert usable_cores(machine) == 2


@pytest.mark.parametrize(("asked", "expected"), [("2", 2), ("2,1", 2), ("64", 3), ("", 3), ("many", 3)])
def test_number_of_threads_in_the_environment_is_a_limit(machine, monkeypatch, asked, expected):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert usable_cores(machine) == expected
