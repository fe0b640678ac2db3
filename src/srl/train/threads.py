"""How many CPU threads torch uses: a rule, from the model's size and the cores that the process may use."""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from srl.config import Config
from srl.models.load import count_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PARAMETERS_A_THREAD = 8_000_000
"""Smaller shares of a model take longer to hand to a thread than to compute, above all on a busy machine."""


def set_threads(model: PreTrainedModel, config: Config) -> int:
    """Have torch use as many threads as `model` is worth, all cores where it is on a GPU; their number."""
    parameters = count_parameters(model) if model.device.type == "cpu" else None
    threads = threads_for(parameters, config)
    torch.set_num_threads(threads)
    return threads


def threads_for(parameters: int | None, config: Config) -> int:
    """`trainer.threads`, 1 for runs that repeat bit for bit, $OMP_NUM_THREADS, or what the rule says.

    `parameters` None: a model that is computed elsewhere, so that all cores are free.
    """
    if config.trainer.threads or config.rollout.deterministic:
        return config.trainer.threads or 1
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    cores = usable_cores()
    return cores if parameters is None else max(1, min(cores, parameters // PARAMETERS_A_THREAD))


def in_words(threads: int) -> str:
    return f"{threads} thread{'' if threads == 1 else 's'}"


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores in the process's affinity, at most the CPUs that its cgroup and those above it allow."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = affinity(0) if affinity else range(os.cpu_count() or 1)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    limits = [len({_read(root / siblings.format(cpu)) or str(cpu) for cpu in cpus})]
    top = root / "sys/fs/cgroup"
    inner = top / _read(root / "proc/self/cgroup").rpartition("::/")[2]
    for folder in (inner, *inner.parents):
        limit = _read(folder / "cpu.max").split()
        if len(limit) == 2 and all(part.isdecimal() for part in limit):
            limits.append(ceil(int(limit[0]) / int(limit[1])))
        if folder == top:
            break
    return max(1, min(limits))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
