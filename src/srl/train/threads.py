"""How many CPU threads torch should use: what a short measurement finds fastest."""

from __future__ import annotations

import os
import time

import torch


def set_threads(wanted: int | None, deterministic: bool) -> int:
    """Use `wanted` threads, one where runs must repeat bit for bit, else the fastest of 1 and all."""
    threads = wanted or (1 if deterministic else fastest_threads())
    torch.set_num_threads(threads)
    return threads


def fastest_threads(seconds: float = 0.15) -> int:
    """1 or all cores, whichever multiplies small matrices faster right now.

    On a busy machine two threads wait for each other: slower by more than ten times, not faster.
    """
    everyone = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if everyone == 1 or torch.cuda.is_available():
        return everyone
    before = torch.get_num_threads()
    speeds = {threads: _speed(threads, seconds) for threads in (1, everyone)}
    torch.set_num_threads(before)
    return everyone if speeds[everyone] > 1.15 * speeds[1] else 1


def _speed(threads: int, seconds: float) -> float:
    """Products of a (2048, 128) and a (128, 256) matrix a second."""
    torch.set_num_threads(threads)
    left, right = torch.ones(2048, 128), torch.ones(128, 256)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        left @ right
        count += 1
    return count / elapsed
