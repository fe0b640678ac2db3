"""The plan of a run: what it would do, the memory and the time it takes, and what would stop it.

No weights are loaded, no process is started and nothing is written. Memory is counted from the model's shape,
time from a short measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin, context_errors, local_errors, truncation_errors
from srl.model import pick_device, pick_dtype
from srl.train.disk_space import lack_of_room
from srl.train.dry_run.facts import machine_facts, run_facts
from srl.train.dry_run.memory import (
    Footprint,
    GenerationMemory,
    Layout,
    Part,
    available_memory,
    checkpoint_bytes,
    footprint,
    generation,
    machine_memory,
)
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.remedy import (
    LOCAL,
    USABLE,
    Device,
    Phase,
    memory_warnings,
    settings_that_fit,
    sizes,
)
from srl.train.dry_run.startup_errors import startup_errors
from srl.train.dry_run.step_time import (
    DeviceSpeed,
    EpisodeTokens,
    StepTimes,
    half_of_the_budgets,
    measure,
    step_times,
)
from srl.train.fetch_models import with_cached_models
from srl.train.load_components import engine_name
from srl.train.make_missing import Note, check_data, start_of
from srl.train.model_check import check_start
from srl.train.threads import threads_for
from srl.train.verl.config_check import compose, notes, problems
from srl.train.verl.job import WORKERS_WITHOUT_GPU, Job, is_megatron, precision, rollout_name
from srl.train.verl.model_check import check_start_on_verl
from srl.train.verl.overrides import given
from srl.train.verl.translate import defaults, settings
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

GPUS = {"16 GB": 15.6, "24 GB": 24.0, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 139.0}
"""GiB of the usual GPUs, for a plan made on a machine without one."""
NOT_HERE = Device("cuda", "a GPU that is not here", None)


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
class LocalFit:
    """Whether a local run fits a GPU that is not here: `settings` make it fit, None where nothing does."""

    name: str
    settings: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class RunPlan:
    """A run before it starts. `memory` is of one device, or of the whole machine where verl has no GPU.

    The local backend alone has times, on a device that is here, and `local_fits` on a GPU that is not. verl
    alone has what follows them; `host` is the memory of each machine.
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
    local_fits: tuple[LocalFit, ...] = ()
    machines: dict[str, str] = field(default_factory=dict)
    settings: tuple[VerlSetting, ...] = ()
    host: tuple[Part, ...] = ()
    generation: GenerationMemory | None = None
    fits: tuple[GpuFit, ...] = ()
    notes: tuple[str, ...] = ()


def plan_local(config: Config) -> RunPlan:
    """The plan of a run on the local backend. Raises UserError where the configuration cannot be planned."""
    check_data(config)
    config = with_cached_models(config)
    if config.model.device.startswith("cuda") and not torch.cuda.is_available():
        return _plan_elsewhere(config)
    target, shape = pick_device(config.model.device), _shape(config)
    layout = Layout("local", cpu=target.type == "cpu")
    speed, assumed = _measured(config, shape, target), half_of_the_budgets(config)
    said = _local_warnings(config, target)
    planned = _plan(config, config, shape, device_of(target), layout, warnings=said)
    times = step_times(shape, config, speed, assumed)
    return replace(planned, speed=speed, assumed=assumed, time=times)


def _plan_elsewhere(config: Config) -> RunPlan:
    """The plan of a run on a GPU, made where there is none: no times, and which of the usual GPUs fit."""
    dtype = str(pick_dtype(config.model.dtype, torch.device("cuda"))).removeprefix("torch.")
    counted = config.with_settings({"model.device": "cpu", "model.dtype": dtype})
    shape, layout, path = _shape(counted), Layout("local"), start_of(config)
    size = sizes(counted, shape, path, layout)
    fits = (
        LocalFit(name, settings_that_fit(counted, shape, size, memory * 2**30))
        for name, memory in GPUS.items()
    )
    said = _local_warnings(config, torch.device("cuda"))
    planned = _plan(config, counted, shape, NOT_HERE, layout, warnings=said)
    return replace(planned, local_fits=tuple(fits))


def _local_warnings(config: Config, target: torch.device) -> tuple[str, ...]:
    """Lines for what the local backend refuses, and where vLLM generates, whose memory is not planned."""
    engine: str = config.rollout.engine
    if torch.cuda.is_available() or engine != "auto":
        engine = engine_name(config)
    said = [*local_errors(config), *truncation_errors(config, engine)]
    if engine == "vllm" and target.type == "cuda":
        share = config.rollout.gpu_memory_utilization
        said.append(
            f"vLLM generates, and takes rollout.gpu_memory_utilization={share:g} of the GPU, not the KV "
            "cache and the rollout buffers planned here: weights and optimiser states have to fit beside it"
        )
    return tuple(said)


def plan_verl(config: Config, job: Job) -> RunPlan:
    """The plan of a run on verl. Raises UserError if it cannot be translated, or verl is not installed."""
    check_data(config)
    config = with_cached_models(config)
    named = config.with_settings({"model.path": str(start_of(config))})
    composed = compose(named, job)
    layout = layout_of(composed, named, job)
    # The shape in the precision of verl's passes; the GPUs may be on another machine.
    counted = named.with_settings({"model.device": "cpu", "model.dtype": precision(named, job)})
    shape, device = _shape(counted), _verl_device(job)
    engine = generation(shape, counted, layout)
    fits = () if job.cpu else tuple(_fits(counted, footprint(shape, counted, layout), engine, device))
    phases: tuple[Phase, ...] = ("rollout", "update") if job.cpu else ("update",)
    warnings = (*problems(composed, named), *_verl_warnings(named, job, device, fits))
    planned = _plan(
        config, counted, shape, device, layout, phases, warnings, partial(check_start_on_verl, named, job)
    )
    return replace(
        planned,
        machines=machine_facts(named, job, layout, shape), settings=tuple(_changed_settings(named, job)),
        host=() if job.cpu else tuple(machine_memory(shape, counted, layout)), generation=engine, fits=fits,
        notes=(*planned.notes, *notes(named, job)),
    )  # fmt: skip


def _plan(
    config: Config, counted: Config, shape: Shape, device: Device, layout: Layout,
    phases: Sequence[Phase] = LOCAL, warnings: Iterable[str] = (),
    check: Callable[[Note], None] | None = None,
) -> RunPlan:  # fmt: skip
    """What both backends plan. `counted` is `config` in the precision of the passes, `check` that of the
    model, by default the local backend's."""
    path, memory = start_of(config), footprint(shape, counted, layout)
    size = checkpoint_bytes(shape, layout)
    lack = lack_of_room(config.trainer, config.trainer.total_training_steps, Workspace.resolve().runs, size)
    noted: list[str] = []
    said = [
        *context_errors(config, shape.context),
        *startup_errors(config, partial(check or partial(check_start, counted), noted.append)),
        *warnings,
        *memory_warnings(counted, shape, path, device, layout, phases),
        *([lack] if lack else ()),
    ]
    facts = run_facts(config, shape, path, layout)
    return RunPlan(facts, shape, device, memory, memory.rollout, memory.update, tuple(dict.fromkeys(said)),
                   notes=tuple(noted))  # fmt: skip


def _shape(config: Config) -> Shape:
    critic = algorithm_plugin(config.algorithm.name).needs_critic
    return shape_of(config, start_of(config), needs_critic=critic)


def _measured(config: Config, shape: Shape, device: torch.device) -> DeviceSpeed:
    """The device's speed, with as many threads as the run has."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads_for(shape.parameters if device.type == "cpu" else None, config))
    try:
        return measure(shape, device, pick_dtype(config.model.dtype, device))
    finally:
        torch.set_num_threads(before)


def device_of(device: torch.device) -> Device:
    """A GPU with all its memory, or the CPU with the memory that is available now."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Device("cuda", found.name, found.total_memory)
    return Device(device.type, "this CPU" if device.type == "cpu" else device.type, available_memory())


# What verl's plan has in addition


def planned_job(config: Config) -> Job:
    """The job to plan: on GPUs where the configuration counts or names some, or this machine has them."""
    cluster, here = config.cluster, torch.cuda.device_count()
    asked = cluster.n_gpus_per_node is not None or cluster.address is not None
    cpu = config.model.device == "cpu" or cluster.rollout == "torch" or not (asked or here)
    workers = cluster.n_gpus_per_node or (WORKERS_WITHOUT_GPU if cpu else here or 1)
    return Job(Workspace.resolve().runs / "RUN", cpu=cpu, gpus_per_node=workers)


def layout_of(composed: DictConfig, config: Config, job: Job) -> Layout:
    """How the composed configuration spreads the run. Single processes: this command, the trainer, the log
    and the queue."""
    nodes, gpus = composed.trainer.nnodes, composed.trainer.n_gpus_per_node
    rollout, megatron = composed.actor_rollout_ref.rollout, composed.actor_rollout_ref.actor.get("megatron")
    copy_gpus, parts = rollout.tensor_model_parallel_size, 1
    if megatron:
        parts = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    size = (composed.actor_rollout_ref.actor.get("fsdp_config") or {}).get("fsdp_size") or 0
    group = size if 0 < size < nodes * gpus else 0
    once = 4 + composed.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return Layout(
        kind="megatron" if is_megatron(config) else "fsdp", cpu=job.cpu, workers=nodes * gpus, nodes=nodes,
        shard_group=group, model_parts=parts, copy_gpus=copy_gpus, episode_workers=rollout.agent.num_workers,
        single_processes=once,
    )  # fmt: skip


def _verl_device(job: Job) -> Device:
    """This machine's CPU where the run uses no GPU, else its GPU, or one that is not here."""
    if job.cpu or torch.cuda.is_available():
        return device_of(torch.device("cpu" if job.cpu else "cuda"))
    return NOT_HERE


def _fits(config: Config, memory: Footprint, engine: GenerationMemory, device: Device) -> Iterator[GpuFit]:
    """The GPU that is here, or the usual sizes where none is."""
    sizes = {device.name: float(device.memory)} if device.memory else {k: v * 2**30 for k, v in GPUS.items()}
    for name, size in sizes.items():
        share = config.cluster.gpu_memory_utilization * size
        episodes = engine.episodes(share, config.data.max_episode_tokens)
        beside = max(share, engine.before_the_cache) + memory.rollout <= size
        yield GpuFit(name, size, share, episodes, memory.update <= USABLE * size, beside and episodes > 0)


def _verl_warnings(config: Config, job: Job, device: Device, fits: Sequence[GpuFit]) -> Iterator[str]:
    """What is not installed, what is not counted, and generation that does not fit the GPU that is here."""
    name, attention = rollout_name(config, job), config.model.attn_implementation
    if name in ("vllm", "sglang") and find_spec(name) is None:
        yield f"{name} is not installed here; every machine of the run needs it"
    if "flash" not in attention and not job.cpu and not is_megatron(config):
        yield (
            f"model.attn_implementation = {attention} pads the episodes of a pass to the longest, which is "
            "not counted here; flash_attention_2 does not pad, and takes less memory for logits"
        )
    if device.memory is not None and any(not fit.generation_fits for fit in fits):
        yield (
            f"generation does not fit {device.name} at cluster.gpu_memory_utilization = "
            f"{config.cluster.gpu_memory_utilization:g}: change it, set cluster.param_offload=true and "
            "cluster.optimizer_offload=true, or spread each copy over more GPUs "
            "(cluster.tensor_model_parallel_size)"
        )


def _changed_settings(config: Config, job: Job) -> Iterator[VerlSetting]:
    """Every key that is not at verl's default, the section `verl` last."""
    from omegaconf import OmegaConf

    pristine, direct = defaults(config), dict(given(config))
    for key, setting in sorted(settings(config, job).items()):
        default = OmegaConf.select(pristine, key, throw_on_missing=False)
        if key not in direct and default != setting.value:
            yield VerlSetting(key, setting.value, setting.ours)
    for key, value in direct.items():
        yield VerlSetting(key.removeprefix("+"), value, f"verl.{key}")
