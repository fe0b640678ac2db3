"""Chooses how many CPU threads torch uses, by a trial of the model itself on this machine as it is now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from srl.config import Config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRAINING_PASSES = 5
"""Training on a token takes about as long as this many forward passes: its log-probs, the reference's, and an
update, whose backward pass takes twice as long as its forward pass."""
GAIN = 1.1
"""More threads are taken where they are faster by this factor."""
_ROWS, _LENGTH = 8, 16
"""The pass that is tried: episodes × tokens."""
_LARGE_S = 0.3
"""A model whose decode step takes longer on one thread is tried with decode steps alone."""
_HOPELESS = 4.0
"""Where more threads take so many times longer than one, threads wait for each other: no more are tried."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Trial:
    """Median seconds by number of threads: of a decode step of `rows` episodes, and of a forward pass of
    `tokens` tokens (empty for a large model). Hopeless numbers are missing."""

    rows: int
    decode_s: Mapping[int, float]
    tokens: int
    forward_s: Mapping[int, float]

    def costs(self, passes: int) -> dict[int, float]:
        """Seconds for one token by number of threads: to decode it, and `passes` forward passes over it."""
        decode = {count: seconds / self.rows for count, seconds in self.decode_s.items()}
        if not self.forward_s:
            return decode
        forward = {count: passes * seconds / self.tokens for count, seconds in self.forward_s.items()}
        return {count: decode[count] + forward[count] for count in forward}

    def __str__(self) -> str:
        parts = [f"a decode step of {self.rows} episodes took {_in_ms(self.decode_s)}"]
        if self.forward_s:
            parts.append(f"a forward pass of {self.tokens} tokens {_in_ms(self.forward_s)}")
        return ", ".join(parts)


def fixed_threads(config: Config) -> int | None:
    """The number that `config` sets: `trainer.threads`, or 1 for runs that repeat bit for bit; else None."""
    return config.trainer.threads or (1 if config.rollout.deterministic else None)


def choose_threads(model: PreTrainedModel, config: Config, passes: int, note: Callable[[str], None]) -> int:
    """Use as many threads as `config` sets, else as many as run `model` fastest in a short trial.

    It takes a third of a second for a small model, and about two for a large one. On a busy machine several
    threads wait for each other and can be more than ten times slower than one.
    `passes` is as in `Trial.costs`. Returns the number, and tells `note` what was measured. A model on a GPU
    is not tried: it gets all cores.
    """
    fixed, candidates = fixed_threads(config), thread_counts(usable_cores())
    threads = fixed or candidates[-1]
    if fixed is None and model.device.type == "cpu" and len(candidates) > 1:
        rows = min(config.rollout.max_num_seqs, _ROWS)
        found = try_threads(model, rows, candidates, time.perf_counter)
        threads = fewest_fast(found.costs(passes))
        note(f"{in_words(threads)}: {found}")
    torch.set_num_threads(threads)
    return threads


def choose_threads_for(work: Callable[[], object], config: Config) -> int:
    """The same where there is no model to try: as many threads as do `work` fastest."""
    fixed, candidates = fixed_threads(config), thread_counts(usable_cores())
    threads = fixed or fewest_fast(median_seconds(work, candidates, time.perf_counter))
    torch.set_num_threads(threads)
    return threads


def try_threads(model: PreTrainedModel, rows: int, candidates: Sequence[int], clock: Clock) -> Trial:
    """Time decode steps of `rows` episodes and short forward passes with each number of threads."""
    call: Any = model

    def forward(rows: int, length: int) -> Callable[[], object]:
        ids = torch.zeros(rows, length, dtype=torch.long)
        return lambda: call(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)

    step, whole = forward(rows, 1), forward(_ROWS, _LENGTH)
    torch.set_num_threads(candidates[0])
    with torch.inference_mode():
        step()  # reads the weights, which may still be on disk
        decode_s = median_seconds(step, candidates, clock)
        is_large = decode_s[candidates[0]] > _LARGE_S
        forward_s = {} if is_large else median_seconds(whole, list(decode_s), clock)
    return Trial(rows, decode_s, _ROWS * _LENGTH, forward_s)


def median_seconds(work: Callable[[], object], candidates: Sequence[int], clock: Clock) -> dict[int, float]:
    """Median seconds of `work` with each number of threads, up to the first at which it takes much longer.

    The numbers take turns, so that other load on the machine meets all of them. Work of milliseconds is
    repeated for a tenth of a second, slow work for less than a second; each number has one turn at least.
    """
    found: dict[int, list[float]] = {count: [] for count in candidates}

    def seconds() -> float:
        start = clock()
        work()
        return clock() - start

    torch.set_num_threads(candidates[0])
    once = seconds()
    budget = min(max(6 * len(candidates) * once, 0.1), 0.7)
    calls = min(max(round(budget / (4 * len(candidates) * once)), 1), 20) if once > 0 else 1
    begun, rising = clock(), list(candidates)
    while True:
        for count in rising:
            torch.set_num_threads(count)
            first = seconds()  # it also wakes the threads
            hopeless = first > _HOPELESS * once
            found[count] += [first] if hopeless or calls == 1 else [seconds() for _ in range(calls)]
            if hopeless:
                rising = [each for each in rising if each < count] or [candidates[0]]
                break
        if clock() - begun >= budget:
            return {count: median(times) for count, times in found.items() if times}


def fewest_fast(costs: Mapping[int, float]) -> int:
    """The number of threads with the lowest cost; a smaller one unless more threads gain by `GAIN`."""
    chosen = min(costs)
    for count in sorted(costs):
        if costs[chosen] >= GAIN * costs[count]:
            chosen = count
    return chosen


def thread_counts(cores: int) -> list[int]:
    """Powers of two below `cores`, and `cores`."""
    return [*(1 << power for power in range(cores.bit_length()) if 1 << power < cores), cores]


def in_words(threads: int) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def _in_ms(seconds: Mapping[int, float]) -> str:
    """`31 ms with 1, 17 with 2`."""
    first, *others = (f"{1e3 * each:.3g}{{}} with {count}" for count, each in seconds.items())
    return ", ".join([first.format(" ms"), *(other.format("") for other in others)])


# The cores that this process may use


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores in the process's affinity, at most the quota of its cgroup and $OMP_NUM_THREADS."""
    known = getattr(os, "sched_getaffinity", None)
    cpus = known(0) if known else range(os.cpu_count() or 1)
    limits = [len({_siblings(root, cpu) for cpu in cpus}), *_quotas(root)]
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        limits.append(int(asked))
    return max(1, min(limits))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of the core that `cpu` is of, as Linux writes them."""
    file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(file) or str(cpu)


def _quotas(root: Path) -> list[int]:
    """CPUs that the process's cgroup and those above it may use, of version 2 or 1; empty without a limit."""
    found = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        version_1 = "cpu" in controllers.split(",")
        if controllers and not version_1:
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if version_1 else "")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if version_1:
                limit = [_read(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
            else:
                limit = _read(folder / "cpu.max").split()
            if len(limit) == 2 and all(part.isdecimal() for part in limit):
                found.append(ceil(int(limit[0]) / int(limit[1])))
            if folder == top:
                break
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
