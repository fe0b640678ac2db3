"""`srl train --dry-run`: the memory of a run by part, what to set where it does not fit, what would stop it.

No weights are loaded, no process is started, nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from srl.config import Config
from srl.config.cross_checks import algorithm_plugin, check_context
from srl.config.sections import NamedRetriever, Search
from srl.data.demonstration_file import read_demonstrations
from srl.data.parquet import read_questions
from srl.errors import CheckFailed, UserError
from srl.index import check_index
from srl.index.retriever import load_retriever
from srl.models.hub import HubName, hub_name
from srl.models.load import check_directory, check_tags, pick_device, pick_dtype
from srl.plugins import manager
from srl.rollout.codec import Codec
from srl.rollout.glue import DIFFERENCES
from srl.serve.cassette import Replay
from srl.serve.request import retrieve_url
from srl.train import local_backend
from srl.train.load_components import engine_name, load_algorithm, load_rewards
from srl.train.load_protocol import (
    declared_tools,
    is_native,
    load_codec,
    load_template,
    native_glue,
    with_base_tokenizer,
    with_protocol,
)
from srl.train.make_missing import check_corpus_exists, check_data, check_files, start_of, with_cached_models
from srl.train.memory import (
    GIB,
    GPUS,
    Layout,
    Part,
    Shape,
    available_memory,
    footprint,
    gib,
    settings_that_fit,
    shape_of,
    total,
)
from srl.train.questions import load_split, order_of
from srl.train.report import check_loggers
from srl.train.verl.config_check import check_supported, validated
from srl.train.verl.job import WORKERS_WITHOUT_GPU, Job, precision
from srl.trajectory import Phase
from srl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Plan:
    """A run before it starts. `memory` is of the device. `fits` says what to set (None: nothing is enough) on
    the device, which has `available` bytes, or where it is not here on each of the usual GPUs."""

    shape: Shape
    device: str
    available: int | None
    memory: tuple[Part, ...]
    fits: dict[str, dict[str, Any] | None]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_run(config: Config, backend: str = "local") -> Plan:
    """The plan of a run. Raises UserError where the configuration cannot be planned."""
    check_data(config)
    notes = list[str]()
    config = with_base_tokenizer(with_protocol(with_cached_models(config), notes.append))
    path, cuda, cpu = start_of(config), torch.cuda.is_available(), False
    if backend == "verl":
        whole, job = config.with_settings({"model.path": str(path)}), planned_job(config)
        layout, dtype = layout_of(config, job), precision(config, job)
        refuses = validated if find_spec("verl") else check_supported
        checks = [partial(refuses, whole, job)]
    else:
        cpu = not config.model.device.startswith("cuda") and pick_device(config.model.device).type == "cpu"
        here = config if cpu or cuda else config.with_settings({"model.device": "cpu"})
        layout = Layout(cpu=cpu, served=not cpu and engine_name(here) == "vllm")
        dtype = str(pick_dtype(config.model.dtype, torch.device("cpu" if cpu else "cuda")))[len("torch.") :]
        checks = [partial(local_backend.check, here)]
    # Counted in the precision of the passes; the device may be on another machine.
    counted = config.with_settings({"model.device": "cpu", "model.dtype": dtype})
    shape = shape_of(counted, path, needs_critic=algorithm_plugin(config.algorithm.name).needs_critic)
    downloads = " (not downloaded yet)" if HubName.parse(path) else ""
    notes.append(
        f"{hub_name(path) or path}{downloads}: {shape.kind}, {shape.parameters / 1e6:,.1f} M parameters, "
        f"{shape.layers} layers; {shape.trainable / 1e6:,.1f} M are trained"
    )
    if is_native(config):
        notes += native_lines(config.with_settings({"model.path": str(path)}))
    if layout.served:
        share = config.rollout.gpu_memory_utilization
        notes.append(f"the server takes rollout.gpu_memory_utilization={share:g} of a GPU beside these parts")
    warnings = startup_errors(config, partial(check_context, config, shape.context), *checks)
    if cpu:
        name, available = "this CPU", available_memory()
    elif cuda:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, available = properties.name, properties.total_memory
    else:
        name, available = "a GPU that is not here", None
    rooms = {name: available} if available else {gpu: int(size * GIB) for gpu, size in GPUS.items()}
    fits = {device: settings_that_fit(counted, shape, layout, room) for device, room in rooms.items()}
    memory = tuple(footprint(shape, counted, layout))
    return Plan(shape, name, available, memory, fits, tuple(notes), tuple(warnings))


def native_lines(config: Config) -> Iterator[str]:
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


def startup_errors(config: Config, *checks: Callable[[], object]) -> list[str]:
    """A line for each error in data, prompts, plugins and what is searched, and for those of `checks`.

    No server is contacted.
    """
    errors, model, search = list[str](), config.model, config.search

    def check(what: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return what(*arguments)
        except (UserError, CheckFailed) as error:
            errors.append(str(error))

    check(check_loggers, config.trainer.logger)
    check(load_algorithm, config)
    for name in config.reward.weights:
        check(manager.load, "reward", name, config.reward.options(name))
    for path in filter(None, (model.path, config.ref.path)):
        if Path(path).is_dir():
            check(check_directory, Path(path), model.trust_remote_code)
    if model.path is None and config.sft.train_files is not None:
        check(read_demonstrations, Path(config.sft.train_files))
    start, codec = config.with_settings({"model.path": str(start_of(config))}), None
    if not HubName.parse(start.model.tokenizer or start.model.path or ""):
        codec = check(load_codec, start.model, None, lambda note: None)
    if codec and is_native(config):
        check(native_glue, start)
    elif codec:
        check(check_tags, codec.tokenizer)
    check(load_template, config)
    check(check_files, config)
    for phase in ("train", "val", "test"):
        check(_check_split, phase, config, codec)
    mode, file = search.cassette_use or ("", "")
    if config.rollout.search and mode == "replay":
        check(partial(Replay, file, topk=search.topk))
    elif config.rollout.search:
        if mode == "record" and Path(file).exists():
            errors.append(f"{file} already exists; name another file (search.cassette)")
        if config.data.corpus is not None:
            check(check_corpus_exists, Path(config.data.corpus))
        if search.url is None and search.index is None:
            check(load_retriever, config.retriever.name, config.retriever.options(config.retriever.name))
        sources: list[Search | NamedRetriever] = [search, *search.retrievers.values()]
        for source in sources:
            for url in source.url or ():
                check(retrieve_url, url)
            if source.index is not None:
                check(check_index, Path(source.index))
        for named in search.retrievers.values():
            if named.retriever is not None:
                check(load_retriever, named.retriever, named.options)
    for further in checks:
        check(further)
    return list(dict.fromkeys(errors))


def _check_split(phase: Phase, config: Config, codec: Codec | None) -> None:
    """The questions of one phase, where their files are here; there are some to train on, which fit
    `data.mix`. Without a tokenizer they are only read."""
    files = [Path(file) for file in getattr(config.data, f"{phase}_files") or ()]
    if not all(file.exists() for file in files):
        return
    if codec is None:
        for file in files:
            read_questions(file)
        return
    questions = load_split(phase, config, codec, lambda note: None)
    if phase == "train" and files:
        order_of(questions, config.data, config.trainer.seed)
        for line in load_rewards(config).without_effect(questions):
            raise UserError(line)


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
    shards = group if 0 < group < workers else workers
    copy_gpus = 1 if job.cpu else config.cluster.tensor_model_parallel_size
    return Layout(verl=True, served=True, workers=workers, shards=shards, copy_gpus=copy_gpus)


def in_words(settings: dict[str, Any] | None) -> str:
    """What to type for a run to fit."""
    if settings is None:
        return "no setting is enough: take adapters, a smaller model, shorter episodes or more GPUs"
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
