"""The plan of a run on verl: `srl train --backend verl --dry-run`. No process is started."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from srl.config import Config
from srl.config.checks import algorithm_plugin
from srl.train.dry_run.facts import gib, run_facts
from srl.train.dry_run.memory import (
    Footprint,
    GenerationMemory,
    Layout,
    footprint,
    generation,
    host_memory,
)
from srl.train.dry_run.model_size import Shape, shape_of
from srl.train.dry_run.plan import (
    USABLE,
    Device,
    GpuFit,
    RunPlan,
    VerlSetting,
    device_of,
    memory_warnings,
    model_warnings,
)
from srl.train.dry_run.preflight import startup_errors
from srl.train.dry_run.remedy import Phase, with_settings
from srl.train.learning_rate import updates_in_words
from srl.train.prepare import BASE_MODEL, check_data
from srl.train.verl.config_check import compose, notes, problems
from srl.train.verl.job import (
    WORKERS_WITHOUT_GPU,
    Job,
    is_megatron,
    precision,
    rollout_name,
)
from srl.train.verl.overrides import given
from srl.train.verl.translate import defaults, settings
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

GPUS = {"24 GB": 24.0, "48 GB": 45.0, "80 GB": 79.6, "141 GB": 139.0}
"""GiB of the usual GPUs, for a plan made on a machine without one."""


def planned_job(config: Config) -> Job:
    """The job to plan: on GPUs where the configuration counts or names some, or this machine has them."""
    cluster, here = config.cluster, torch.cuda.device_count()
    asked = cluster.n_gpus_per_node is not None or cluster.address is not None
    cpu = config.model.device == "cpu" or cluster.rollout == "torch" or not (asked or here)
    workers = cluster.n_gpus_per_node or (WORKERS_WITHOUT_GPU if cpu else here or 1)
    return Job(Workspace.resolve().runs / "RUN", cpu=cpu, gpus_per_node=workers)


def plan_verl(config: Config, job: Job) -> RunPlan:
    """The plan of a run on verl. Raises UserError if it cannot be translated, or verl is not installed."""
    check_data(config)
    path = config.model.path or str(BASE_MODEL)
    named = with_settings(config, {"model.path": path})
    composed = compose(named, job)
    processes = processes_of(composed)
    layout = layout_of(composed, named, job, processes)
    # The shape in the precision of verl's passes; the GPUs may be on another machine.
    counted = with_settings(named, {"model.device": "cpu", "model.dtype": precision(named, job)})
    needs_critic = algorithm_plugin(config.algorithm.name).needs_critic
    shape, device = shape_of(counted, path, needs_critic=needs_critic), _device(job)
    memory, engine = footprint(shape, counted, layout), generation(shape, counted, layout)
    fits = () if job.cpu else tuple(_fits(counted, memory, engine, device))
    phases: tuple[Phase, ...] = ("rollout", "update") if job.cpu else ("update",)
    warnings = [
        *model_warnings(named, shape, path),
        *problems(composed, named),
        *startup_errors(named),
        *_installation_warnings(named, job),
        *memory_warnings(counted, shape, path, device, layout, phases),
        *_generation_warnings(named, device, fits),
    ]
    return RunPlan(
        run_facts(config, shape, path, layout), shape, device, memory, memory.rollout, memory.update,
        tuple(dict.fromkeys(warnings)), machines=machine_facts(named, job, layout, processes, shape),
        settings=tuple(_changed_settings(named, job)),
        host=() if job.cpu else host_memory(shape, counted, layout), generation=engine, fits=fits,
        notes=tuple(notes(named, job)),
    )  # fmt: skip


def processes_of(composed: DictConfig) -> dict[str, int]:
    """The processes of a run, by what they do."""
    workers = composed.trainer.nnodes * composed.trainer.n_gpus_per_node
    rollout = composed.actor_rollout_ref.rollout
    queue = composed.transfer_queue.backend.SimpleStorage.num_data_storage_units
    return {
        "workers that train": workers,
        "servers that generate": workers // rollout.tensor_model_parallel_size,
        "workers that run episodes": rollout.agent.num_workers,
        "for this command, the trainer, the log, the queue": 4 + queue,
    }


def layout_of(composed: DictConfig, config: Config, job: Job, processes: dict[str, int]) -> Layout:
    """How the composed configuration spreads the run."""
    nodes = composed.trainer.nnodes
    megatron = composed.actor_rollout_ref.actor.get("megatron")
    *spread, once = processes.values()
    return Layout(
        kind="megatron" if is_megatron(config) else "fsdp",
        cpu=job.cpu,
        workers=nodes * composed.trainer.n_gpus_per_node,
        nodes=nodes,
        model_parts=megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
        if megatron
        else 1,
        copy_gpus=composed.actor_rollout_ref.rollout.tensor_model_parallel_size,
        processes=sum(-(-count // nodes) for count in spread) + once,
    )


def _device(job: Job) -> Device:
    """This machine's CPU where the run uses no GPU, else its GPU, or one that is not here."""
    if job.cpu:
        return device_of(torch.device("cpu"))
    if torch.cuda.is_available():
        return device_of(torch.device("cuda"))
    return Device("cuda", "a GPU that is not here", None)


def machine_facts(
    config: Config, job: Job, layout: Layout, processes: dict[str, int], shape: Shape
) -> dict[str, str]:
    """Which machine and which GPU does what, and what one step counts."""
    batch, n, actor = config.data.train_batch_size, config.rollout.n, config.actor
    weights = gib((shape.parameters + shape.adapter) * shape.itemsize)
    return {
        "machines": _machines(config, layout),
        "training": _training(config, layout, shape),
        "generation": _generation(config, job, layout),
        "processes": ", ".join(f"{count} {what}" for what, count in processes.items()),
        "each step": f"{batch * n:,} episodes, {updates_in_words(config, actor)} of "
        f"{min(actor.ppo_mini_batch_size, batch) * n:,}; {weights} of weights to each copy",
    }


def _machines(config: Config, layout: Layout) -> str:
    what = "workers on the CPU" if layout.cpu else "GPUs with one worker each"
    cluster = config.cluster.address
    where = f"the Ray cluster at {cluster}" if cluster else "a Ray cluster of its own"
    return f"{layout.nodes} × {layout.workers // layout.nodes} {what}; {where}"


def _training(config: Config, layout: Layout, shape: Shape) -> str:
    networks = ["policy", *(["critic"] if shape.critic else []), *(["reference"] if shape.reference else [])]
    share = f"1/{layout.shards}" + (" of the weights" if layout.kind == "megatron" else "")
    return f"{config.cluster.strategy}: each worker holds {share} of the {', the '.join(networks)}"


def _generation(config: Config, job: Job, layout: Layout) -> str:
    name = rollout_name(config, job).removeprefix("srl_")
    gpus = "1 GPU" if layout.copy_gpus == 1 else f"{layout.copy_gpus} GPUs"
    where = "each beside a worker" if layout.cpu else f"each on {gpus} of training, in turn with it"
    limit = f"up to {config.rollout.max_num_seqs:,} episodes at once"
    return f"{name}: {layout.copies} copies of the policy, {where}, {limit}"


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


def _fits(config: Config, memory: Footprint, engine: GenerationMemory, device: Device) -> Iterator[GpuFit]:
    """The GPU that is here, or the usual sizes where none is."""
    sizes = {device.name: float(device.memory)} if device.memory else {k: v * 2**30 for k, v in GPUS.items()}
    for name, size in sizes.items():
        share = config.cluster.gpu_memory_utilization * size
        episodes = engine.episodes(share, config.data.max_episode_tokens)
        beside = share + memory.rollout <= size
        yield GpuFit(name, size, share, episodes, memory.update <= USABLE * size, beside and episodes > 0)


def _installation_warnings(config: Config, job: Job) -> Iterator[str]:
    name, attention = rollout_name(config, job), config.model.attn_implementation
    if name in ("vllm", "sglang") and find_spec(name) is None:
        yield f"{name} is not installed here; every machine of the run needs it"
    if "flash" not in attention and not job.cpu and not is_megatron(config):
        yield (
            f"model.attn_implementation = {attention} pads the episodes of a pass to the longest, which is "
            "not counted here; flash_attention_2 does not pad, and takes less memory for logits"
        )


def _generation_warnings(config: Config, device: Device, fits: tuple[GpuFit, ...]) -> Iterator[str]:
    """A line where generation does not fit the GPU that is here."""
    if device.memory is not None and any(not fit.generation_fits for fit in fits):
        yield (
            f"generation does not fit {device.name} at cluster.gpu_memory_utilization = "
            f"{config.cluster.gpu_memory_utilization:g}: change it, set cluster.param_offload=true and "
            "cluster.optimizer_offload=true, or spread each copy over more GPUs "
            "(cluster.tensor_model_parallel_size)"
        )
