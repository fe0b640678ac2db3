"""What a run on verl would do and take, said before anything starts: `srl train --backend verl --dry-run`.

No process is started and nothing is written. Memory is counted from the model's shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.train.dry_run.memory import Footprint, Part
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.plan import USABLE, Device, device_of, gib
from srl.train.dry_run.preflight import refusals
from srl.train.dry_run.remedy import remedy, with_settings
from srl.train.dry_run.verl_facts import machine_facts, run_facts
from srl.train.dry_run.verl_memory import (
    Generation,
    Split,
    generation,
    host,
    training,
    without_gpu,
)
from srl.train.prepare import BASE_MODEL, check_data
from srl.train.verl.config_check import notes, problems
from srl.train.verl.job import WORKERS_WITHOUT_GPU, Job
from srl.train.verl.overrides import given
from srl.train.verl.setting import is_megatron, longest, precision, rollout_name
from srl.train.verl.translate import compose, defaults, settings
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

GPUS = {"24 GB": 24.0, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 139.0}
"""GiB that GPUs of these sizes have, for a plan made on a machine without one."""
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Line:
    """A key of verl's that is not at verl's default, and the key of ours that it comes from."""

    key: str
    value: Any
    ours: str


@dataclass(frozen=True, slots=True)
class Fit:
    """One size of GPU: its bytes, what generation may have of them, and how many episodes that holds."""

    name: str
    memory: float
    share: float
    episodes: int
    update_fits: bool
    generation_fits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A run on verl before it starts: in words, in verl's keys, by machine, and in bytes.

    `memory` is of each GPU, or of the whole machine where there is none; `host` of each machine with GPUs.
    """

    facts: dict[str, str]
    machines: dict[str, str]
    settings: tuple[Line, ...]
    shape: Shape
    device: Device
    memory: Footprint
    update_peak: int
    host: tuple[Part, ...]
    generation: Generation
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def planned_job(config: Config) -> Job:
    """The job of a plan: on GPUs where the configuration counts or names some, or this machine has them."""
    cluster, here = config.cluster, torch.cuda.device_count()
    asked = cluster.n_gpus_per_node is not None or cluster.address is not None
    cpu = config.model.device == "cpu" or cluster.rollout == "torch" or not (asked or here)
    workers = cluster.n_gpus_per_node or (WORKERS_WITHOUT_GPU if cpu else here or 1)
    return Job(Workspace.resolve().runs / "RUN", cpu=cpu, gpus_per_node=workers)


def plan(config: Config, job: Job) -> Plan:
    """The plan of a run of `config`. Raises UserError where it cannot be translated, or verl is not here."""
    check_data(config)
    named = config if config.model.path else with_settings(config, {"model.path": str(BASE_MODEL)})
    composed = compose(named, job)
    shape, split = _shape(named, job), split_of(composed, named, job)
    processes = processes_of(composed, split)
    memory = (
        without_gpu(shape, named, split, sum(processes.values()))
        if job.cpu
        else training(shape, named, split)
    )
    device = _device(job)
    making = generation(shape, named, split)
    fits = () if job.cpu else tuple(_fits(named, memory, making, device))
    return Plan(
        run_facts(config, named, shape), machine_facts(named, job, split, processes, shape),
        tuple(_changed(named, job)), shape, device, memory, memory.update,
        () if job.cpu else host(shape, named, split, _on_a_node(processes, split)), making, fits,
        tuple(notes(named, job)), tuple(_warnings(named, job, composed, memory, fits, device, shape)),
    )  # fmt: skip


def _shape(config: Config, job: Job) -> Shape:
    """The model's shape, in the precision of the run; no GPU has to be on this machine."""
    here = with_settings(config, {"model.device": "cpu", "model.dtype": precision(config, job)})
    needs_critic = algorithm_plugin(config.algorithm.name).needs_critic
    assert config.model.path is not None
    return shape_of(here, config.model.path, needs_critic=needs_critic)


def split_of(composed: DictConfig, config: Config, job: Job) -> Split:
    """How the composed configuration spreads the run."""
    workers = composed.trainer.nnodes * composed.trainer.n_gpus_per_node
    engine = composed.actor_rollout_ref.actor.get("megatron")
    parts = engine.tensor_model_parallel_size * engine.pipeline_model_parallel_size if engine else 1
    return Split(
        workers=workers,
        nodes=composed.trainer.nnodes,
        copy_gpus=composed.actor_rollout_ref.rollout.tensor_model_parallel_size,
        itemsize=BYTES[precision(config, job)],
        megatron=is_megatron(config),
        parts=parts,
        cpu=job.cpu,
    )


def processes_of(composed: DictConfig, split: Split) -> dict[str, int]:
    """The processes of a run by what they do."""
    units = composed.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return {
        "workers that train": split.workers,
        "servers that generate": split.copies,
        "workers that run episodes": composed.actor_rollout_ref.rollout.agent.num_workers,
        "for this command, the trainer, the log, the queue": 4 + units,
    }


def _on_a_node(processes: dict[str, int], split: Split) -> int:
    """The processes of the machine that has most: its share of the spread ones, and what runs once."""
    *spread, once = processes.values()
    return sum(-(-count // split.nodes) for count in spread) + once


def _device(job: Job) -> Device:
    """The GPU of this machine, its processor where the run has none, or a GPU that is not here."""
    if job.cpu:
        return device_of(torch.device("cpu"))
    if torch.cuda.is_available():
        return device_of(torch.device("cuda"))
    return Device("cuda", "a GPU that is not here", None)


def _changed(config: Config, job: Job) -> Iterator[Line]:
    """Every key that is not at verl's default, the section `verl` last."""
    from omegaconf import OmegaConf

    pristine, direct = defaults(config), dict(given(config))
    for key, setting in sorted(settings(config, job).items()):
        default = OmegaConf.select(pristine, key, throw_on_missing=False)
        if key not in direct and default != setting.value:
            yield Line(key, setting.value, setting.ours)
    for key, value in direct.items():
        yield Line(key.removeprefix("+"), value, f"verl.{key}")


def _fits(config: Config, memory: Footprint, making: Generation, device: Device) -> Iterator[Fit]:
    """The GPU that is here, or the usual sizes where none is."""
    usual = {name: gigs * 2**30 for name, gigs in GPUS.items()}
    sizes = usual if device.memory is None else {device.name: float(device.memory)}
    for name, size in sizes.items():
        share = config.cluster.gpu_memory_utilization * size
        episodes = making.episodes(share, longest(config))
        beside = share + memory.rollout <= size
        yield Fit(name, size, share, episodes, memory.update <= USABLE * size, beside and episodes > 0)


def _warnings(
    config: Config, job: Job, composed: DictConfig, memory: Footprint, fits: tuple[Fit, ...],
    device: Device, shape: Shape,
) -> Iterator[str]:  # fmt: skip
    """What would keep the run from starting or from fitting, each with the key to turn."""
    if not Path(str(config.model.path)).is_dir():
        yield f"there are no weights at {config.model.path}; give --model DIRECTORY to train"
    yield from problems(composed, config)
    yield from refusals(config)
    yield from _installed(config, job)
    if shape.context is not None and longest(config) > shape.context:
        yield (
            f"data.max_prompt_length + data.max_response_length = {longest(config):,} tokens, and the model "
            f"reads {shape.context:,}; lower one of them"
        )
    if job.cpu and device.memory is not None and memory.update > USABLE * device.memory:
        yield f"the run takes {gib(memory.update)}, and this machine has {gib(device.memory)} available"
    if device.memory is not None:
        yield from _too_large(config, job, composed, fits)


def _installed(config: Config, job: Job) -> Iterator[str]:
    name = rollout_name(config, job)
    if name in ("vllm", "sglang") and find_spec(name) is None:
        yield f"{name} is not installed here; every machine of the run needs it"
    if "flash" not in config.model.attn_implementation and not job.cpu and not is_megatron(config):
        yield (
            f"model.attn_implementation = {config.model.attn_implementation} pads the episodes of a pass to "
            "the longest, which is not counted here; flash_attention_2 does not, and takes less for logits"
        )


def _too_large(config: Config, job: Job, composed: DictConfig, fits: tuple[Fit, ...]) -> Iterator[str]:
    """A line for each phase that does not fit the GPU that is here."""

    def footprint_of(changed: Config) -> Footprint:
        return training(_shape(changed, job), changed, split_of(composed, changed, job))

    for fit in fits:
        if not fit.update_fits:
            room = USABLE * fit.memory
            yield f"the update does not fit {fit.name}: {remedy(config, 'update', room, footprint_of)}"
        if not fit.generation_fits:
            yield (
                f"generation does not fit {fit.name} at cluster.gpu_memory_utilization = "
                f"{config.cluster.gpu_memory_utilization:g}: change it, set cluster.param_offload=true and "
                "cluster.optimizer_offload=true, or spread a copy (cluster.tensor_model_parallel_size)"
            )
