"""A machine without an accelerator as a platform of verl's: tensors on the CPU, gloo between processes.

verl knows GPUs and NPUs. Elsewhere it falls back to CUDA and fails at the first tensor. The variable
`VERL_PLATFORM=cpu` selects this platform in every process that has it installed.
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
    """verl's FSDP engines under the device `cpu`: they name CUDA and NPU alone, and run here as they are."""
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        known = EngineRegistry._engines.get(kind, {})
        missing = [backend for backend in BACKENDS if NAME not in known.get(backend, {})]
        EngineRegistry.register(model_type=kind, backend=missing, device=NAME)(engine)


def device_module() -> ModuleType:
    """What stands where verl calls `torch.cuda`: `torch.cpu`, and the functions that it lacks."""
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
    """Memory that is not the device's own needs no care."""


def _no_bytes(*_: Any) -> int:
    return 0


class CPU:
    """The methods that `verl.plugin.platform.PlatformBase` asks for; `install` joins the two."""

    device_name = NAME
    vendor_name = NAME
    device_module = device_module()

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Never chosen by looking around, only by name: another run's processes shall not find it."""
        return False

    def current_device(self) -> torch.device:
        return torch.device(NAME)

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing runs behind the caller's back."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The allocator has none."""

    def empty_cache(self) -> None:
        """There is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        """`GPU`: verl counts GPUs and NPUs alone; the launcher gives Ray as many of them as workers."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No profiler of the device's."""

    def profiler_stop(self) -> None:
        """No profiler of the device's."""

    def cudart(self) -> None:
        return None
