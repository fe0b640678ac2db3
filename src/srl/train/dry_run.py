"""What `srl train --dry-run` shows: the run in words, its memory by part, and what would stop it.

No weights are loaded but those of a model that is quick to check, no process is started, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin, context_errors, local_errors, truncation_errors
from srl.hub_models import HubName, hub_name
from srl.model import pick_device, pick_dtype
from srl.train.disk_space import kept_checkpoints, lack_of_room
from srl.train.fetch_models import with_cached_models
from srl.train.fit import (
    BUCKET,
    GPUS,
    USABLE,
    Layout,
    Part,
    Phase,
    Size,
    available_memory,
    checkpoint_bytes,
    footprint,
    generation,
    gib,
    machine_memory,
    settings_that_fit,
    total,
)
from srl.train.learning_rate import updates_in_words
from srl.train.load_components import engine_name
from srl.train.make_missing import check_data, start_of
from srl.train.model_check import check_start
from srl.train.model_size import Shape, shape_of
from srl.train.startup_errors import startup_errors
from srl.train.verl.config_check import check_supported, compose, notes, problems
from srl.train.verl.job import WORKERS_WITHOUT_GPU, Job, is_megatron, precision, rollout_name
from srl.train.verl.model_check import check_start_on_verl
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it starts. `memory` is of the device, or of the machine where verl has no GPU; `host` of
    each of verl's machines. `available` are the bytes of the device, None where it is not here; then `fits`
    says for each of the usual GPUs what to set (None: nothing is enough)."""

    facts: dict[str, str]
    shape: Shape
    device: str
    available: int | None
    memory: tuple[Part, ...]
    host: tuple[Part, ...]
    fits: dict[str, dict[str, Any] | None]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_run(config: Config, backend: str = "local") -> Plan:
    """The plan of a run. Raises UserError where the configuration cannot be planned."""
    check_data(config)
    config = with_cached_models(config)
    path, cuda = start_of(config), torch.cuda.is_available()
    if backend == "verl":
        named = config.with_settings({"model.path": str(path)})
        job = planned_job(config)
        check_supported(named, job)
        layout, dtype, noted = layout_of(named, job), str(precision(named, job)), [*_verl_notes(named, job)]
        said = [*_verl_problems(named, job)]
        device = torch.device("cpu" if job.cpu else "cuda")
    else:
        wants_cuda = config.model.device.startswith("cuda")
        device = torch.device("cuda") if wants_cuda and not cuda else pick_device(config.model.device)
        layout, noted = Layout("local", cpu=device.type == "cpu"), list[str]()
        dtype = str(pick_dtype(config.model.dtype, device)).removeprefix("torch.")
        said = [*_local_problems(config, device)]
    # Counted in the precision of the passes; the device may be on another machine.
    counted = config.with_settings({"model.device": "cpu", "model.dtype": dtype})
    if backend == "verl":
        check = partial(check_start_on_verl, named, job)
    else:
        check = partial(check_start, config if device.type == "cpu" or cuda else counted)
    critic = algorithm_plugin(config.algorithm.name).needs_critic
    shape = shape_of(counted, path, needs_critic=critic)
    name, available = _device(device)
    memory = footprint(shape, counted, layout)
    warnings = [
        *context_errors(config, shape.context),
        *startup_errors(config, partial(check, noted.append)),
        *said,
    ]
    rooms = {name: float(available)} if available else {gpu: size * 2**30 for gpu, size in GPUS.items()}
    fits = {gpu: _settings(counted, shape, path, layout, room) for gpu, room in rooms.items()}
    if available:
        warnings += _memory_warnings(name, available, memory, fits[name])
    trainer, size = config.trainer, checkpoint_bytes(shape, layout)
    lack = lack_of_room(trainer, trainer.total_training_steps, Workspace.resolve().runs, size)
    warnings += [lack] if lack else []
    return Plan(
        facts=_facts(config, shape, path, layout, size), shape=shape, device=name, available=available,
        memory=tuple(memory), fits={} if available else fits, notes=tuple(noted),
        host=tuple(machine_memory(shape, counted, layout)) if backend == "verl" and not layout.cpu else (),
        warnings=tuple(dict.fromkeys(warnings)),
    )  # fmt: skip


def _device(device: torch.device) -> tuple[str, int | None]:
    """The device's name, and its memory: all of a GPU, what is available now of the CPU's."""
    if device.type == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(device)
        return properties.name, properties.total_memory
    if device.type == "cuda":
        return "a GPU that is not here", None
    return "this CPU" if device.type == "cpu" else device.type, available_memory()


def _settings(
    config: Config, shape: Shape, path: str | Path, layout: Layout, memory: float
) -> dict[str, Any] | None:
    """The settings with which both phases fit `memory` bytes; None where none are enough."""
    is_local, shapes = layout.kind == "local", {(config.model.lora_rank, config.critic.lora_rank): shape}

    def size(phase: Phase, chosen: dict[str, Any]) -> Size:
        def count(settings: Any) -> int:
            changed = config.with_settings({**chosen, **settings})
            ranks = changed.model.lora_rank, changed.critic.lora_rank
            if ranks not in shapes:
                shapes[ranks] = shape_of(changed, path, needs_critic=shape.critic > 0)
            return total(footprint(shapes[ranks], changed, layout), phase) + beside(
                phase, shapes[ranks], changed
            )

        return count

    def beside(phase: Phase, shape: Shape, changed: Config) -> int:
        """verl's server has its share of a GPU while it generates, and must hold an episode in it."""
        if is_local or layout.cpu or phase == "update":
            return 0
        engine, share = generation(shape, changed, layout), config.cluster.gpu_memory_utilization * memory
        fits = engine.episodes(share, config.data.max_episode_tokens) > 0
        return (
            int(max(share, engine.weights + engine.own + BUCKET)) - int((1 - USABLE) * memory)
            if fits
            else 2**60
        )

    chosen: dict[str, Any] = {}
    phases: tuple[Phase, ...] = ("update", "rollout")
    for phase in phases:
        counted = config.with_settings(chosen)
        found = settings_that_fit(counted, shape, phase, size(phase, chosen), USABLE * memory, is_local)
        if found is None:
            return None
        chosen |= found
    return chosen


def _memory_warnings(
    device: str, memory: int, parts: list[Part], settings: dict[str, Any] | None
) -> Iterator[str]:
    if settings == {}:
        return
    needed = max(total(parts, "rollout"), total(parts, "update"))
    advice = "use a smaller model, shorter episodes or more devices" if settings is None else typed(settings)
    yield f"the run needs {gib(needed)} at once, and {device} has {gib(memory)}: {advice}"


def typed(settings: dict[str, Any]) -> str:
    """Settings as options to type."""
    return " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items())


def _local_problems(config: Config, device: torch.device) -> Iterator[str]:
    """What the local backend refuses, and where vLLM generates, whose memory is not planned."""
    engine: str = config.rollout.engine
    if torch.cuda.is_available() or engine != "auto":
        engine = engine_name(config)
    yield from local_errors(config)
    yield from truncation_errors(config, engine)
    if engine == "vllm" and device.type == "cuda":
        share = config.rollout.gpu_memory_utilization
        yield (
            f"vLLM takes rollout.gpu_memory_utilization={share:g} of the GPU, not the KV cache and the "
            "rollout buffers planned here: weights and optimiser states have to fit beside it"
        )


# verl


def planned_job(config: Config) -> Job:
    """The job to plan: on GPUs where the configuration counts or names some, or this machine has them."""
    cluster, here = config.cluster, torch.cuda.device_count()
    asked = cluster.n_gpus_per_node is not None or cluster.address is not None
    cpu = config.model.device == "cpu" or cluster.rollout == "torch" or not (asked or here)
    workers = cluster.n_gpus_per_node or (WORKERS_WITHOUT_GPU if cpu else here or 1)
    return Job(Workspace.resolve().runs / "RUN", cpu=cpu, gpus_per_node=workers)


def layout_of(config: Config, job: Job) -> Layout:
    """How verl spreads the run, by our keys and those below `verl:` that change it."""
    cluster, kind = config.cluster, "megatron" if is_megatron(config) else "fsdp"
    nodes = 1 if job.cpu else cluster.nnodes
    workers = nodes * job.gpus_per_node
    actor = ((config.verl.get("actor_rollout_ref") or {}).get("actor")) or {}
    group = (actor.get("fsdp_config") or {}).get("fsdp_size") or 0
    megatron = actor.get("megatron") or {}
    parts = megatron.get("tensor_model_parallel_size", 1) * megatron.get("pipeline_model_parallel_size", 1)
    return Layout(
        "megatron" if kind == "megatron" else "fsdp", cpu=job.cpu, workers=workers, nodes=nodes,
        shard_group=group if 0 < group < workers else 0, model_parts=parts if kind == "megatron" else 1,
        copy_gpus=1 if job.cpu else cluster.tensor_model_parallel_size,
        episode_workers=cluster.agent_workers,
    )  # fmt: skip


def _verl_problems(config: Config, job: Job) -> Iterator[str]:
    """What would end the run in verl's workers, where verl is installed to tell."""
    if find_spec("verl") is not None:
        yield from problems(compose(config, job), config)
    name, attention = rollout_name(config, job), config.model.attn_implementation
    if name in ("vllm", "sglang") and find_spec(name) is None:
        yield f"{name} is not installed here; every machine of the run needs it"
    if "flash" not in attention and not job.cpu and not is_megatron(config):
        yield (
            f"model.attn_implementation = {attention} pads the episodes of a pass to the longest, which is "
            "not counted here; flash_attention_2 does not pad, and takes less memory for logits"
        )


def _verl_notes(config: Config, job: Job) -> Iterator[str]:
    if find_spec("verl") is not None:
        yield from notes(config, job)
    else:
        yield "verl is not installed here: what it would refuse is not known"


# In words


def _facts(config: Config, shape: Shape, path: str | Path, layout: Layout, size: int) -> dict[str, str]:
    """What is trained, how, on what, for how long, and what it leaves behind."""
    rollout, data, actor, trainer = config.rollout, config.data, config.actor, config.trainer
    name = hub_name(path) or path if config.model.path is not None else "the small base model of srl"
    what = f"a LoRA adapter of rank {config.model.lora_rank}" if shape.adapter else "all weights"
    rank = config.critic.lora_rank
    critic = f", and a critic{f' with an adapter of rank {rank}' if rank else ''}" if shape.critic else ""
    first = "" if config.model.path is not None else f"; first {config.sft.steps} steps of fine-tuning"
    kept = kept_checkpoints(trainer, trainer.total_training_steps)
    return {
        "model": f"{name}{' (not downloaded yet)' if HubName.parse(path) else ''}: {shape.kind}, "
        f"{shape.parameters / 1e6:,.1f} M parameters, {shape.layers} layers, width {shape.width}",
        "trained": f"{what}, {shape.trainable / 1e6:,.1f} M{critic}{first}",
        "algorithm": f"{config.algorithm.name}: {data.train_batch_size} questions × {rollout.n} episodes a "
        f"step, {updates_in_words(config, actor)}, learning rate {actor.optim.lr:g}",
        "episodes": f"up to {data.max_prompt_length:,} tokens of prompt and {data.max_response_length:,} of "
        f"response; up to {rollout.max_turns + 1} turns of {rollout.max_turn_tokens} tokens",
        "questions": f"{', '.join(data.train_files or ()) or 'of the made-up world'}, "
        f"prompt {data.template or 'as in the files'}",
        "search": _search(config),
        "reward": " + ".join(f"{weight:g} × {name}" for name, weight in config.reward.weights.items()),
        "length": f"{trainer.total_training_steps} steps; a checkpoint every {trainer.save_freq or 'run'}, "
        f"a validation every {trainer.test_freq or 'run'}",
        "checkpoints": f"{gib(size)} each, up to {kept.most} kept: {gib(kept.most * size)}",
        **({} if layout.kind == "local" else _placement(config, shape, layout)),
    }


def _search(config: Config) -> str:
    search, (mode, cassette) = config.search, config.search.cassette_use or ("", "")
    if not config.rollout.search:
        return "none (rollout.search=false)"
    if search.replays:
        return f"replayed from {cassette}"
    corpus = config.data.corpus or "the made-up world's pages"
    index = search.index or f"{config.retriever.name} over {corpus}"
    lines = [f"{', '.join(search.url) if search.url else index}, {search.topk} passages a search"]
    for name, other in search.retrievers.items():
        where = ", ".join(other.url) if other.url else other.index or other.retriever
        lines.append(f"{name}: {where}, {other.topk or search.topk} passages a search")
    if search.url or any(other.url for other in search.retrievers.values()):
        lines.append("a dry run contacts no server (`srl serve check URL` does)")
    return "; ".join([*lines, *([f"recorded on {cassette}"] if mode else [])])


def _placement(config: Config, shape: Shape, layout: Layout) -> dict[str, str]:
    """verl's: which machine and which GPU does what."""
    cluster, engine = config.cluster, generation(shape, config, layout)
    what = "workers on the CPU" if layout.cpu else "GPUs"
    where = f"the Ray cluster at {cluster.address}" if cluster.address else "a Ray cluster of its own"
    held = "" if layout.cpu else f", {engine.token:,} bytes of KV cache a token"
    return {
        "machines": f"{layout.nodes} × {layout.workers // layout.nodes} {what}; {where}",
        "training": f"{cluster.strategy}: each worker holds 1/{layout.shards} of the weights",
        "generation": f"{layout.copies} copies of {gib(engine.weights)} on each of {layout.copy_gpus}{held}",
    }


def plan_tables(plan: Plan) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Headings and rows of the tables that show a plan."""
    yield ("the run", ""), list(plan.facts.items())
    for title, parts in (("memory, estimated", plan.memory), ("memory of each machine", plan.host)):
        if parts:
            rows = [
                (p.name, *(gib(size) if size else "–" for size in (p.rollout, p.update)), p.how)
                for p in parts
            ]
            sums = [gib(total(parts, phase)) for phase in ("rollout", "update")]
            has = (
                f"{plan.device} has {gib(plan.available)}" if plan.available and parts is plan.memory else ""
            )
            yield (title, "rollout", "update", "counted as"), [*rows, ("total", *sums, has)]
    if plan.fits:
        said = [
            (
                gpu,
                "does not fit"
                if settings is None
                else f"fits {'with ' + typed(settings) if settings else ''}",
            )
            for gpu, settings in plan.fits.items()
        ]
        yield ("on a GPU of", ""), said
