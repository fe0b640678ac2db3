"""Sets how many CPU threads torch uses, by a short measurement."""

from __future__ import annotations

import os
import time

import torch


def set_threads(wanted: int | None, deterministic: bool) -> int:
    """Use `wanted` threads, else 1 if runs must repeat bit for bit, else the faster of 1 and all cores."""
    threads = wanted or (1 if deterministic else fastest_threads())
    torch.set_num_threads(threads)
    return threads


def fastest_threads(seconds: float = 0.15) -> int:
    """1 or the number of cores, whichever multiplies small matrices faster right now.

    On a busy machine several threads wait for each other and can be more than ten times slower than one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores == 1 or torch.cuda.is_available():
        return cores
    before = torch.get_num_threads()
    speeds = {threads: _speed(threads, seconds) for threads in (1, cores)}
    torch.set_num_threads(before)
    return cores if speeds[cores] > 1.15 * speeds[1] else 1


def _speed(threads: int, seconds: float) -> float:
    """Products of a (2048, 128) and a (128, 256) matrix per second."""
    torch.set_num_threads(threads)
    left, right = torch.ones(2048, 128), torch.ones(128, 256)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        left @ right
        count += 1
    return count / elapsed
