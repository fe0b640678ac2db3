"""A platform of verl for machines without a GPU: tensors on the CPU, gloo between processes.

verl has platforms for GPUs and NPUs; elsewhere it falls back to CUDA and fails at the first tensor.
`VERL_PLATFORM=cpu` selects this platform in every process in which `install` has run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

NAME = "cpu"
BACKENDS = ["fsdp", "fsdp2"]


def install() -> None:
    """Registers the platform under `cpu`, and the FSDP engines of actor and critic for it. Idempotent."""
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    if PlatformRegistry.get(NAME) is None:
        PlatformRegistry.register(platform=NAME)(type("CPUPlatform", (CPU, PlatformBase), {}))
    _register_engines()


def _register_engines() -> None:
    """Register verl's FSDP engines for `cpu` too; as they come, they are for CUDA and NPU only."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        known = EngineRegistry._engines.get(kind, {})
        missing = [backend for backend in BACKENDS if NAME not in known.get(backend, {})]
        EngineRegistry.register(model_type=kind, backend=missing, device=NAME)(engine)


def device_module() -> ModuleType:
    """The module verl uses in place of `torch.cuda`: `torch.cpu`, with the functions it lacks."""
    module = ModuleType("srl.train.verl.without_gpu.platform.device")
    vars(module).update({name: getattr(torch.cpu, name) for name in torch.cpu.__all__})
    nothing = dict.fromkeys(("empty_cache", "ipc_collect", "set_per_process_memory_fraction"), _nothing)
    amounts = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update(nothing | dict.fromkeys(amounts, _no_bytes))
    vars(module).update(
        mem_get_info=lambda *_: (0, 0), get_device_name=lambda *_: NAME,
        get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
    )  # fmt: skip
    return module


def _nothing(*_: Any) -> None:
    """Nothing to do: there is no device memory."""


def _no_bytes(*_: Any) -> int:
    return 0


class CPU:
    """The methods of `verl.plugin.platform.PlatformBase`; `install` adds that base class."""

    device_name = NAME
    vendor_name = NAME
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never detected, only selected by name: no other program's processes should use it."""
        return False

    def current_device(self) -> torch.device:
        return torch.device(NAME)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing: every call is synchronous."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Nothing: the allocator has no settings."""

    def empty_cache(self) -> None:
        """Nothing: there is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """`GPU`: verl counts GPUs and NPUs only. The launcher tells Ray there is one for each worker."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Nothing: the device has no profiler."""

    def profiler_stop(self) -> None:
        """Nothing: the device has no profiler."""

    def cudart(self) -> None:
        return None
