"""The plan of a run: what it would do, the memory and the time it takes, and what would stop it.

No weights are loaded and nothing is written. Memory is counted from the model's shape, time from a short
measurement. `plan_local` plans the local backend; `verl_plan.py` plans verl.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from srl.config import Config
from srl.config.checks import algorithm_plugin, context_errors
from srl.model import pick_device, pick_dtype
from srl.train.dry_run.facts import gib, run_facts
from srl.train.dry_run.memory import (
    Footprint,
    GenerationMemory,
    Layout,
    Part,
    footprint,
)
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.preflight import startup_errors
from srl.train.dry_run.remedy import Phase, remedy
from srl.train.dry_run.step_time import (
    DeviceSpeed,
    EpisodeTokens,
    StepTimes,
    half_of_the_budgets,
    measure,
    step_times,
)
from srl.train.prepare import BASE_MODEL, check_data
from srl.train.threads import fastest_threads

USABLE = 0.9
"""Share of a device's memory that a run can plan with; libraries and fragmentation take the rest."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device, and its memory in bytes where that is known."""

    kind: str
    name: str
    memory: int | None


@dataclass(frozen=True, slots=True)
class VerlSetting:
    """A key of verl's that is not at verl's default, and the key of ours that it comes from."""

    key: str
    value: Any
    ours: str


@dataclass(frozen=True, slots=True)
class GpuFit:
    """Whether a run fits a GPU of `memory` bytes: `share` of them are for generation, which then holds
    `episodes` whole episodes at once."""

    name: str
    memory: float
    share: float
    episodes: int
    update_fits: bool
    generation_fits: bool


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run before it starts. `memory` is of one device, or of the whole machine where verl has no GPU.

    The local backend alone has times. verl alone has what follows them; `host` is the memory of each machine.
    """

    facts: dict[str, str]
    shape: Shape
    device: Device
    memory: Footprint
    rollout_peak: int
    update_peak: int
    warnings: tuple[str, ...]
    speed: DeviceSpeed | None = None
    assumed: EpisodeTokens | None = None
    time: StepTimes | None = None
    machines: dict[str, str] = field(default_factory=dict)
    settings: tuple[VerlSetting, ...] = ()
    host: tuple[Part, ...] = ()
    generation: GenerationMemory | None = None
    fits: tuple[GpuFit, ...] = ()
    notes: tuple[str, ...] = ()


def plan_local(config: Config) -> RunPlan:
    """The plan of a run on the local backend. Raises UserError where the configuration cannot be planned."""
    check_data(config)
    target = pick_device(config.model.device)
    path = config.model.path or BASE_MODEL
    shape = shape_of(config, path, needs_critic=algorithm_plugin(config.algorithm.name).needs_critic)
    device, layout = device_of(target), Layout("local", cpu=target.type == "cpu")
    memory, speed = footprint(shape, config, layout), _measured(config, shape, target)
    assumed = half_of_the_budgets(config)
    warnings = [
        *model_warnings(config, shape, path),
        *startup_errors(config),
        *memory_warnings(config, shape, path, device, layout),
    ]
    return RunPlan(
        run_facts(config, shape, path, layout), shape, device, memory, memory.rollout, memory.update,
        tuple(dict.fromkeys(warnings)), speed, assumed, step_times(shape, config, speed, assumed),
    )  # fmt: skip


def _measured(config: Config, shape: Shape, device: torch.device) -> DeviceSpeed:
    """The device's speed with as many threads as the run would use."""
    before = torch.get_num_threads()
    automatic = 1 if config.rollout.deterministic else fastest_threads()
    torch.set_num_threads(config.trainer.threads or automatic)
    try:
        return measure(shape, device, pick_dtype(config.model.dtype, device))
    finally:
        torch.set_num_threads(before)


def device_of(device: torch.device) -> Device:
    """A GPU with all its memory, or the CPU with the memory that is available now."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device("cuda", found.name, found.total_memory)
    return Device(device.type, "this CPU" if device.type == "cpu" else device.type, _available_memory())


def _available_memory(path: Path = Path("/proc/meminfo")) -> int | None:
    """Bytes of memory that Linux reports as available; None elsewhere."""
    if not path.is_file():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(lines["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in lines else None


def model_warnings(config: Config, shape: Shape, path: str | Path) -> Iterator[str]:
    """Missing weights, and episodes longer than the model's context."""
    if not Path(path).is_dir():
        yield f"there are no weights at {path}; give --model DIRECTORY to train"
    yield from context_errors(config, shape.context)


def memory_warnings(
    config: Config, shape: Shape, path: str | Path, device: Device, layout: Layout,
    phases: Sequence[Phase] = ("rollout", "update"),
) -> Iterator[str]:  # fmt: skip
    """A line for each phase that does not fit the device, with the settings that make it fit."""
    if device.memory is None:
        return
    room = USABLE * device.memory

    def footprint_of(changed: Config) -> Footprint:
        other = shape
        if changed.model.lora_rank != config.model.lora_rank:
            other = shape_of(changed, path, needs_critic=shape.critic > 0)
        return footprint(other, changed, layout)

    for phase in phases:
        size = getattr(footprint(shape, config, layout), phase)
        if size > room:
            yield (
                f"the {phase} needs {gib(size)}, and {device.name} has {gib(device.memory)}: "
                f"{remedy(config, phase, room, footprint_of)}"
            )
