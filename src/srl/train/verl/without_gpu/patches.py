"""Changes of verl that only a machine without a GPU needs; see `srl.train.verl.patches`."""

from __future__ import annotations

import os
from datetime import timedelta

import torch

from srl.train.verl.patches import Patch, put, replace
from srl.train.verl.without_gpu.vllm_cpu import packed_weights_are_kept, vllm_cpu_counts_as_vllm


def process_group_has_one_backend() -> None:
    """Name the one backend of the process group once."""
    from verl.utils import distributed

    replace(distributed, "initialize_global_process_group_ray", join_process_group)


def join_process_group(timeout_second: float | None = None, backend: str | None = None) -> None:
    """Initialise the process group over gloo, unless it is initialised."""
    if torch.distributed.is_initialized():
        return
    torch.distributed.init_process_group(
        backend=backend or "cpu:gloo",
        rank=int(os.environ.get("RANK", "0")),
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        timeout=None if timeout_second is None else timedelta(seconds=timeout_second),
        init_method=os.environ.get("DIST_INIT_METHOD"),
    )


def reference_is_not_offloaded() -> None:
    """Build the reference without offloading."""
    from verl.workers.engine.fsdp import transformer_impl

    put(transformer_impl, "CPUOffloadPolicy", no_offload)


def no_offload(pin_memory: bool = True) -> None:
    """In place of `CPUOffloadPolicy`."""


PATCHES = (
    Patch(
        process_group_has_one_backend,
        "utils/distributed.py, initialize_global_process_group_ray",
        "It names a backend for the CPU and one for the device. If both are the CPU, torch refuses: "
        '"Duplicate device type cpu in backend string".',
    ),
    Patch(
        reference_is_not_offloaded,
        "workers/engine/fsdp/transformer_impl.py, FSDPEngine._build_fsdp_module",
        "FSDP2 offloads the reference to pinned memory, which without a GPU raises "
        '"Cannot access accelerator device when none is available".',
    ),
)
VLLM_PATCHES = (
    Patch(
        vllm_cpu_counts_as_vllm,
        "third_party/vllm/__init__.py and workers/rollout/vllm_rollout/__init__.py",
        "Both read the version of the package vllm, and raise if vllm-cpu is what is installed.",
    ),
    Patch(
        packed_weights_are_kept,
        "vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm (of vLLM)",
        "It packs each linear layer's weight for its kernel and drops the parameter. Loading the next "
        "weights fails with \"'Parameter' object has no attribute 'weight_loader'\", and the trainer hangs.",
        "none up to vllm-cpu 0.30.0",
    ),
)
"""With the package vllm-cpu only: applied by `install`, and by vLLM's entry point."""
