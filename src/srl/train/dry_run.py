"""`srl train --dry-run`: the memory of a run by part, what to set where it does not fit, what would stop it.

No weights are loaded but those of a model that is quick to check, no process is started, nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin, context_errors, truncation_errors
from srl.errors import UserError
from srl.models.hub import HubName, hub_name
from srl.models.load import pick_device, pick_dtype
from srl.rollout.glue import DIFFERENCES
from srl.train.load_components import engine_name
from srl.train.load_protocol import (
    declared_tools,
    is_native,
    load_template,
    native_glue,
    with_base_tokenizer,
    with_protocol,
)
from srl.train.make_missing import check_data, start_of, with_cached_models
from srl.train.memory import (
    GIB,
    GPUS,
    PHASES,
    Fits,
    Layout,
    Part,
    available_memory,
    checkpoint_bytes,
    footprint,
    gib,
    settings_that_fit,
    total,
)
from srl.train.model_check import check_start
from srl.train.model_size import Shape, shape_of
from srl.train.startup_errors import startup_errors
from srl.train.verl.config_check import check_supported, compose, problems
from srl.train.verl.job import WORKERS_WITHOUT_GPU, Job, precision, rollout_name
from srl.train.verl.model_check import check_start_on_verl
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it starts. `memory` is of the device. `fits` says what to set (None: nothing is enough) on
    the device, which has `available` bytes, or where it is not here on each of the usual GPUs."""

    shape: Shape
    device: str
    available: int | None
    memory: tuple[Part, ...]
    fits: Fits
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_run(config: Config, backend: str = "local") -> Plan:
    """The plan of a run. Raises UserError where the configuration cannot be planned."""
    check_data(config)
    noted = list[str]()
    config = with_base_tokenizer(with_protocol(with_cached_models(config), noted.append))
    path, cuda = start_of(config), torch.cuda.is_available()
    if backend == "verl":
        with_path, job = config.with_settings({"model.path": str(path)}), planned_job(config)
        check_supported(with_path, job)
        layout, dtype, cpu = layout_of(with_path, job), str(precision(with_path, job)), False
        problems = [*_verl_problems(with_path, job, noted)]
    else:
        cpu = not config.model.device.startswith("cuda") and pick_device(config.model.device).type == "cpu"
        layout, device = Layout(cpu=cpu), torch.device("cpu" if cpu else "cuda")
        dtype = str(pick_dtype(config.model.dtype, device)).removeprefix("torch.")
        problems = [*_local_problems(config, cpu)]
    # Counted in the precision of the passes; the device may be on another machine.
    counted = config.with_settings({"model.device": "cpu", "model.dtype": dtype})
    if backend == "verl":
        check = partial(check_start_on_verl, with_path, job)
    else:
        check = partial(check_start, config if cpu or cuda else counted)
    needs_critic = algorithm_plugin(config.algorithm.name).needs_critic
    shape = shape_of(counted, path, needs_critic=needs_critic)
    downloads = " (not downloaded yet)" if HubName.parse(path) else ""
    noted.append(
        f"{hub_name(path) or path}{downloads}: {shape.kind}, {shape.parameters / 1e6:,.1f} M parameters, "
        f"{shape.layers} layers; {shape.trainable / 1e6:,.1f} M are trained"
    )
    if backend == "local":
        noted.append(f"a checkpoint takes {gib(checkpoint_bytes(shape))}")
    if is_native(config):
        noted += native_line(config.with_settings({"model.path": str(path)}))
    warnings = [
        *context_errors(config, shape.context),
        *startup_errors(config, partial(check, noted.append)),
        *problems,
    ]
    if cpu:
        name, available = "this CPU", available_memory()
    elif cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, available = properties.name, properties.total_memory
    else:
        name, available = "a GPU that is not here", None
    rooms = {name: available} if available else {gpu: int(size * GIB) for gpu, size in GPUS.items()}
    fits = settings_that_fit(counted, path, shape, layout, rooms)
    memory = tuple(footprint(shape, counted, layout))
    if available and fits[name] != {}:
        peak = gib(max(total(memory, phase) for phase in PHASES))
        warnings.append(f"the run needs {peak}, {name} has {gib(available)}: {in_words(fits[name])}")
    return Plan(shape, name, available, memory, fits, tuple(noted), tuple(dict.fromkeys(warnings)))


def native_line(config: Config) -> Iterator[str]:
    """How the policy calls its tools; nothing where it cannot, which is an error of the start."""
    with suppress(UserError):
        glue = native_glue(config)
        tools = ", ".join(tool["function"]["name"] for tool in declared_tools(config))
        whole = load_template(config).untagged == "text"
        answer = "the final message" if whole else "what the final message has between <answer> tags"
        yield (
            f"protocol native ({glue.call_format}, from the model's chat template), stop {glue.stop}, tools "
            f"{tools}; answer: {answer}"
        )
        if glue.differences:
            whys = "; ".join(DIFFERENCES[name] for name in glue.differences)
            yield f"a history that a client renders anew is not quite the one that is trained: {whys}"


def _local_problems(config: Config, cpu: bool) -> Iterator[str]:
    """What the local backend refuses, and where vLLM generates, whose memory is not planned."""
    engine: str = config.rollout.engine
    if torch.cuda.is_available() or engine != "auto":
        engine = engine_name(config)
    yield from truncation_errors(config, engine)
    if config.rollout.engine == "vllm":
        from srl.rollout.vllm_engine import version_problem

        yield from filter(None, [version_problem()])
    if engine == "vllm" and not cpu:
        share = config.rollout.gpu_memory_utilization
        yield (
            f"vLLM takes rollout.gpu_memory_utilization={share:g} of the GPU, not the KV cache and the "
            "rollout buffers planned here: weights and optimiser states have to fit beside it"
        )


def planned_job(config: Config) -> Job:
    """The job to plan: on GPUs where the configuration counts or names some, or this machine has them."""
    cluster, gpus = config.cluster, torch.cuda.device_count()
    names_gpus = cluster.n_gpus_per_node is not None or cluster.address is not None
    cpu = config.model.device == "cpu" or cluster.rollout == "torch" or not (names_gpus or gpus)
    workers = cluster.n_gpus_per_node or (WORKERS_WITHOUT_GPU if cpu else gpus or 1)
    return Job(Workspace.resolve().runs / "RUN", cpu=cpu, gpus_per_node=workers)


def layout_of(config: Config, job: Job) -> Layout:
    """How verl spreads the run, by our keys and the size of FSDP's groups below `verl:`."""
    workers = job.gpus_per_node * (1 if job.cpu else config.cluster.nnodes)
    actor = ((config.verl.get("actor_rollout_ref") or {}).get("actor")) or {}
    group = (actor.get("fsdp_config") or {}).get("fsdp_size") or 0
    return Layout(
        "verl", workers=workers, shard_group=group if 0 < group < workers else 0,
        copy_gpus=1 if job.cpu else config.cluster.tensor_model_parallel_size,
    )  # fmt: skip


def _verl_problems(config: Config, job: Job, noted: list[str]) -> Iterator[str]:
    """What would end the run in verl's workers, where verl is installed to tell."""
    if find_spec("verl") is not None:
        yield from map(str, problems(compose(config, job), config))
    else:
        noted.append("verl is not installed here: what it would refuse is not known")
    name, attention = rollout_name(config, job), config.model.attn_implementation
    if name in ("vllm", "sglang") and find_spec(name) is None:
        yield f"{name} is not installed here; every machine of the run needs it"
    if "flash" not in attention and not job.cpu:
        yield (
            f"model.attn_implementation = {attention} pads the episodes of a pass to the longest, which is "
            "not counted here; flash_attention_2 does not pad, and takes less memory for logits"
        )


def in_words(settings: dict[str, Any] | None) -> str:
    """What to type for a run to fit."""
    if settings is None:
        return "nothing to set is enough: a smaller model, shorter episodes or more devices"
    return " ".join(f"--set {key}={str(value).lower()}" for key, value in settings.items()) or "it fits"


def plan_tables(plan: Plan) -> Iterator[tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Headings and rows of the tables that show a plan."""
    rows = [
        (part.name, *(gib(size) if size else "–" for size in (part.rollout, part.update)), part.how)
        for part in plan.memory
    ]
    has = f"{plan.device} has {gib(plan.available)}" if plan.available else plan.device
    sums = (gib(total(plan.memory, "rollout")), gib(total(plan.memory, "update")))
    yield ("memory, estimated", "rollout", "update", "counted as"), [*rows, ("total", *sums, has)]
    yield ("on", "what to set"), [(gpu, in_words(settings)) for gpu, settings in plan.fits.items()]
