"""The verl backend: `check` and `prepare` for `srl.train.run`; environment, Ray and the trainer's process."""

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
from srl.install import pip_install
from srl.protocol import Template
from srl.store import RunInfo
from srl.train.episodes import Splits
from srl.train.load_components import load_algorithm, load_codec, load_environment, reference_digest
from srl.train.model_card import card_of_run, write_card
from srl.train.questions import load_splits
from srl.train.report import Terminal, reporters
from srl.train.run_directory import LOG, Progress, checkpoint_path
from srl.train.search import IndexDigests
from srl.train.verl.config_check import notes, refused, validated
from srl.train.verl.failures import ray_starts
from srl.train.verl.job import (
    ABOUT,
    RUN_VARIABLE,
    TORCH,
    WORKERS_WITHOUT_GPU,
    Job,
    device_support,
    rollout_name,
)
from srl.train.verl.log_writer import start_log_actor
from srl.train.verl.model_check import check_start_on_verl
from srl.train.verl.watchdog import PATIENCE_S, RayTraining, RayWriter, watch
from srl.train.watches import Watcher
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false", "HYDRA_FULL_ERROR": "1",
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}  # fmt: skip
"""Set in every process: no telemetry, no progress bars of libraries, and no SIGSEGV handler of Ray's, which
would replace the one that a JVM (pyserini's) needs."""
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes every process of a Ray cluster listen on 127.0.0.1, so that no other machine can join."""
SILENT_RAYLET = {"RAY_DEDUP_LOGS_SKIP_REGEX": "."}
"""Ray prints the death of a worker to the driver's stdout, except for lines that match this."""


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run on verl after all checks, before any process is started."""

    config: Config
    workspace: Workspace
    terminal: Terminal
    splits: Splits
    template: Template
    digests: IndexDigests
    inputs: dict[str, str]
    where: str = "on verl"

    @property
    def questions(self) -> int:
        """How many questions the run trains on."""
        return len(self.splits.train)

    def train(self, run: Path, info: RunInfo, resumed_from: int | None) -> Progress:
        """Start the processes, report what they do, and wait for the end of the training."""
        config, terminal = self.config, self.terminal
        if resumed_from is None:
            write_card(run / ABOUT, card_of_run(config, self.template, self.digests))
        elif resumed_from >= 0:
            terminal.note(f"from {checkpoint_path(run, resumed_from, 'verl').name}")
        job = job_of(config, run, resumed=resumed_from is not None)
        load_codec(config.model, None, lambda text: None).tokenizer.save_pretrained(job.tokenizer)
        variables = environment(job, self.workspace)
        set_environment(variables, shared=config.cluster.address is not None)
        composed = validated(config, job)
        for line in notes(config, job):
            terminal.note(line)
        with (
            reporters(config, run, resumed_from) as also,
            ray_cluster(composed, run.name, variables, quiet=terminal.quiet),
        ):
            writer = _log_writer(run, info, config, resumed_from)
            return watch(lambda: _trainer(composed, run, self.splits), writer, run, config, terminal, also)


def _log_writer(run: Path, info: RunInfo, config: Config, resumed_from: int | None) -> RayWriter:
    """The log writer in a process of its own; the log of a resumed run continues after its checkpoint."""
    trainer, patience = config.trainer, max(PATIENCE_S, config.cluster.watchdog_s)
    actor = start_log_actor(run, run / LOG, info, trainer.sample_freq, trainer.sample_count, Watcher(config))
    writer = RayWriter(actor, run, patience)
    writer.ready()
    if resumed_from is not None:
        writer.drop_steps_after(resumed_from)
    return writer


def _trainer(composed: DictConfig, run: Path, splits: Splits) -> RayTraining:
    """verl's trainer, started in a process of its own."""
    import ray

    runner: Any = ray.remote(num_cpus=1)(Runner).remote()
    return RayTraining(runner.run.remote(composed, run.resolve(), splits))


def check(config: Config) -> None:
    """Raises UserError for what no run on verl does."""
    for problem in refused(config):
        raise UserError(problem)
    check_installed(config)


def prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> VerlRun:
    """Check all that can be checked before a process is started: questions, search, rewards, plugins."""
    load_algorithm(config)
    codec = load_codec(config.model, None, terminal.note)
    splits = load_splits(config, codec, terminal.note, algo)
    if len(splits.train) < config.data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {len(splits.train)} "
            "training questions, and verl takes whole batches only: lower it"
        )
    check_start_on_verl(config, job_of(config, Path()), terminal.note)
    environment = load_environment(config, workspace, codec, terminal.note)
    if config.rollout.search and config.search.url is None and not config.search.replays:
        terminal.note(
            "warning: search.url is not set, so each process that runs episodes opens the index for itself; "
            "one `srl serve retriever` can answer all of them"
        )
    digests = IndexDigests.of(environment.search)
    inputs = digests.as_inputs() | {"reference": reference_digest(config)}
    return VerlRun(config, workspace, terminal, splits, environment.template, digests, inputs)


def check_installed(config: Config) -> None:
    """Raises UserError if verl, an optional part of it that we need, or the rollout engine is not installed.

    So it does for a vLLM that srl does not work with. The engine is looked for only if this machine is the
    whole cluster. verl's warnings about engines that the run does not use are silenced.
    """
    from importlib.util import find_spec

    from srl.rollout.vllm_engine import version_problem

    needed = ("verl", "ray", "transfer_queue", "cachetools", "msgspec", "zmq")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UserError(f"--backend verl needs {missing[0]}; type: {pip_install('verl')}")
    job = job_of(config, Path())
    rollout, problem = rollout_name(config, job), None
    if rollout == "vllm":
        problem = version_problem("cluster.rollout=torch" if job.cpu else None)
    elif rollout != TORCH and find_spec(rollout) is None:
        problem = f"{rollout} is not installed; type pip install {rollout}"
    if problem and config.cluster.address is None:
        raise UserError(f"cluster.rollout={config.cluster.rollout}: {problem}")
    warnings.filterwarnings("ignore", message=".*engine is not available", category=UserWarning)


def job_of(config: Config, run: Path, *, resumed: bool = False) -> Job:
    """What the run uses: the GPUs of this machine, or workers on its CPUs if there are none."""
    import torch

    cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    if config.cluster.address is not None and config.model.device != "cpu":
        cpu = False
    here = WORKERS_WITHOUT_GPU if cpu else torch.cuda.device_count()
    return Job(run, resumed, cpu, config.cluster.n_gpus_per_node or here or 1)


def environment(job: Job, workspace: Workspace) -> dict[str, str]:
    """The environment variables of every process of the run; none is secret."""
    support = device_support(job.cpu)
    return {
        **ENVIRONMENT,
        RUN_VARIABLE: str(job.run.resolve()),
        "SRL_WORKSPACE": str(workspace.root.resolve()),
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING"),
        **(support.ENVIRONMENT if support else {}),
    }


def set_environment(variables: dict[str, str], *, shared: bool) -> None:
    """Set the variables in this process, before Ray is imported, which reads them then.

    A Ray cluster that is not `shared` listens on the loopback only.
    """
    os.environ.update(variables)
    if not shared:
        os.environ.update(LOOPBACK_ONLY)
    if not logging.getLogger("srl").isEnabledFor(logging.DEBUG):
        os.environ.update(SILENT_RAYLET)


@contextmanager
def ray_cluster(
    composed: DictConfig, namespace: str, environment: dict[str, str], *, quiet: bool
) -> Iterator[None]:
    """Connect to the configured Ray cluster, or start one on this machine's loopback.

    Without the address `local` Ray would connect to the cluster of `$RAY_ADDRESS`, or to one that runs here.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    options: Any = OmegaConf.to_container(composed.ray_kwargs.ray_init, resolve=True)
    runtime: Any = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(composed)))
    given = options.pop("runtime_env", None) or {}
    variables = {**runtime.get("env_vars", {}), **environment, **(given.get("env_vars") or {})}
    if options.get("address") is None:
        options |= {"address": "local", "_node_ip_address": "127.0.0.1"}
    else:
        options = {"address": options["address"]}
    with _signals_are_ours(), ray_starts(composed.ray_kwargs.ray_init.get("address")):
        ray.init(
            **options, runtime_env={**runtime, **given, "env_vars": variables}, namespace=namespace,
            log_to_driver=not quiet and logging.getLogger("srl").isEnabledFor(logging.DEBUG),
            logging_level=logging.ERROR,
        )  # fmt: skip
    try:
        yield
    finally:
        with suppress(Exception):
            ray.shutdown()


@contextmanager
def _signals_are_ours() -> Iterator[None]:
    """In the body Ray sets no SIGTERM handler, which would end this process with another exit code."""
    from ray._private import utils

    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs


class Runner:
    """A plain class, of which the launcher makes a Ray actor."""

    def run(self, config: DictConfig, run: Path, splits: Splits) -> None:
        """Set up verl's parts in verl's order, and train to the end of the run."""
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        from srl.train.verl.registration import register
        from srl.train.verl.trainer import SearchTrainer

        register()
        _check_alone()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        try:
            trainer = SearchTrainer(config, run, splits)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        finally:
            tq.close()


def _check_alone() -> None:
    """Raises UserError if another run uses this Ray cluster, which can have one TransferQueue only."""
    import ray

    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return
    raise UserError(
        "another run of verl uses this Ray cluster, which can queue the episodes of one run only: wait for "
        "its end, or give this run a cluster of its own"
    )
