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
CORES = torch.get_num_threads()
"""What torch begins with: $OMP_NUM_THREADS, or the physical cores of the process's affinity."""
QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""The CPU time that a container may use, and of how much, in microseconds."""


def set_threads(model: PreTrainedModel, config: Config) -> int:
    """Have torch use as many threads as `model` is worth, all cores where it is on a GPU; their number.

    That is `trainer.threads`, 1 for runs that repeat bit for bit, $OMP_NUM_THREADS, or what the rule says.
    """
    threads = config.trainer.threads or (1 if config.rollout.deterministic else 0)
    if not threads:
        limit = QUOTA.read_text(encoding="utf-8").split() if QUOTA.is_file() else ["max"]
        threads = CORES if limit[0] == "max" else min(CORES, ceil(int(limit[0]) / int(limit[1])))
        if "OMP_NUM_THREADS" in os.environ:
            threads = CORES
        elif model.device.type == "cpu":
            threads = max(1, min(threads, count_parameters(model) // PARAMETERS_A_THREAD))
    torch.set_num_threads(threads)
    return threads
