"""The section about machines: how many, and which program does what on them."""

from __future__ import annotations

from typing import Literal

from srl.config.base import Count, Positive, Section, Share


class Cluster(Section):
    """Machines and what runs on them; read only with `--engine verl`."""

    nnodes: Count = 1
    """Machines that train."""
    n_gpus_per_node: Count | None = None
    """GPUs of each machine, one worker each. null: those of this machine, two workers if it has none."""
    address: str | None = None
    """A Ray cluster that is there already: auto, or host:port. null: one of this machine's own."""
    strategy: Literal["fsdp2", "fsdp", "megatron"] = "fsdp2"
    """How the model is split over the workers while it is trained."""
    rollout: Literal["auto", "vllm", "sglang", "torch"] = "auto"
    """What generates. torch: the engine of the local trainer, for machines without a GPU. auto: torch there,
    else vllm."""
    tensor_model_parallel_size: Count = 1
    """GPUs that share one copy of the model while it generates."""
    gpu_memory_utilization: Share = 0.6
    """Share of a GPU's memory that generation may take; training needs the rest."""
    param_offload: bool = False
    """Keep the weights in the machine's memory while they are not in use."""
    optimizer_offload: bool = False
    """Keep the optimiser's state in the machine's memory while it is not in use."""
    agent_workers: Count = 8
    """Processes in which episodes run: what talks to the policy and to the search servers. Without a GPU, at
    most one for each worker."""
    watchdog_s: Positive = 1800.0
    """Seconds without any progress after which the run is ended, to be resumed."""
