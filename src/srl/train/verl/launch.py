"""The verl backend: `check` and `prepare` for `srl.train.run`; environment, Ray and the trainer's process."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srl.config import Config
from srl.errors import UserError, first_line
from srl.install import pip_install
from srl.rollout.protocol import Protocol
from srl.store import RunInfo
from srl.train.load_components import load_algorithm, load_environment, load_rewards
from srl.train.load_protocol import card_of_run, generation_eos, load_codec, write_card
from srl.train.questions import Splits, load_splits
from srl.train.report import Terminal, reporters
from srl.train.rl import reference_digest
from srl.train.run_directory import Progress, checkpoint_path
from srl.train.search import as_inputs, index_digests, load_search
from srl.train.verl.config_check import check_supported, validated
from srl.train.verl.follow import follow
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


def check(config: Config) -> None:
    """Raises UserError for what a run on verl cannot keep, and where verl, an optional part of it that we
    need, or the rollout engine is not installed.

    The engine is looked for only if this machine is the whole cluster.
    """
    from srl.rollout.vllm_engine import version_problem

    job = job_of(config, Path())
    check_supported(config, job)
    for name in ("verl", "ray", "transfer_queue", "cachetools", "msgspec", "zmq"):
        if find_spec(name) is None:
            raise UserError(f"--backend verl needs {name}", hint=f"type: {pip_install('verl')}")
    rollout, problem = rollout_name(config, job), None
    if rollout == "vllm":
        problem = version_problem("cluster.rollout=torch" if job.cpu else None)
    elif rollout != TORCH and find_spec(rollout) is None:
        problem = f"{rollout} is not installed; type pip install {rollout}"
    if problem and config.cluster.address is None:
        raise UserError(f"cluster.rollout={config.cluster.rollout}: {problem}", key="cluster.rollout")
    warnings.filterwarnings("ignore", message=".*engine is not available", category=UserWarning)  # verl's


def prepare(config: Config, algo: str, workspace: Workspace, terminal: Terminal) -> VerlRun:
    """Check all that can be checked before a process is started: questions, search, rewards, plugins."""
    load_algorithm(config)
    codec = load_codec(config.model, generation_eos(Path(str(config.model.path))), terminal.note)
    splits = load_splits(config, codec, terminal.note, algo)
    if len(splits.train) < config.data.train_batch_size:
        raise UserError(
            f"data.train_batch_size={config.data.train_batch_size} is more than the {len(splits.train)} "
            "training questions, and verl takes whole batches only", key="data.train_batch_size",
            hint="lower it",
        )  # fmt: skip
    check_start_on_verl(config, job_of(config, Path()), terminal.note)
    search = load_search(config, workspace, terminal.note)
    environment = load_environment(config, codec, search, terminal.note)
    for line in load_rewards(config).without_effect(splits.train):
        terminal.note(f"warning: {line}")
    if config.rollout.search and config.search.url is None and not config.search.replays:
        terminal.note(
            "warning: search.url is not set, so each process that runs episodes opens the index for itself; "
            "one `srl serve retriever` can answer all of them"
        )
    digests = index_digests(search)
    inputs = as_inputs(digests, environment.protocol) | {"reference": reference_digest(config)}
    return VerlRun(config, workspace, terminal, splits, environment.protocol, digests, inputs)


def job_of(config: Config, run: Path, *, resumed: bool = False) -> Job:
    """What the run uses: the GPUs of this machine, or workers on its CPUs if there are none."""
    import torch

    cpu = config.model.device == "cpu" or not torch.cuda.is_available()
    if config.cluster.address is not None and config.model.device != "cpu":
        cpu = False
    workers = WORKERS_WITHOUT_GPU if cpu else torch.cuda.device_count()
    return Job(run, resumed, cpu, config.cluster.n_gpus_per_node or workers or 1)


@dataclass(frozen=True, slots=True)
class VerlRun:
    """A run on verl after all checks, before any process is started."""

    config: Config
    workspace: Workspace
    terminal: Terminal
    splits: Splits
    protocol: Protocol
    digests: dict[str, str]
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
            write_card(run / ABOUT, card_of_run(config, self.protocol, self.digests))
        elif resumed_from >= 0:
            terminal.note(f"from {checkpoint_path(run, resumed_from, 'verl').name}")
        job = job_of(config, run, resumed=resumed_from is not None)
        load_codec(config.model, None, lambda text: None).tokenizer.save_pretrained(job.tokenizer)
        variables = set_environment(config, job, self.workspace)
        composed = validated(config, job)
        with reporters(config, run, resumed_from) as also, ray_cluster(composed, run.name, variables):
            import ray

            log_actor = start_log_actor(run, info, config, resumed_from)
            runner: Any = ray.remote(num_cpus=1)(Runner).remote()
            training = runner.run.remote(composed, run.resolve(), config, self.splits)
            return follow(training, log_actor, run, config, terminal, also)


def set_environment(config: Config, job: Job, workspace: Workspace) -> dict[str, str]:
    """Set the environment variables of every process of the run in this one, and return them.

    It must be done before Ray is imported, which reads them. None is secret. A cluster that the run starts
    listens on the loopback only.
    """
    support = device_support(job.cpu)
    variables = {
        **ENVIRONMENT,
        RUN_VARIABLE: str(job.run.resolve()),
        "SRL_WORKSPACE": str(workspace.root.resolve()),
        "VERL_LOGGING_LEVEL": os.environ.get("VERL_LOGGING_LEVEL", "WARNING"),
        **(support.ENVIRONMENT if support else {}),
    }
    os.environ.update(variables)
    if config.cluster.address is None:
        os.environ.update(LOOPBACK_ONLY)
    if not logging.getLogger("srl").isEnabledFor(logging.DEBUG):
        os.environ.update(SILENT_RAYLET)
    return variables


@contextmanager
def ray_cluster(composed: DictConfig, namespace: str, environment: dict[str, str]) -> Iterator[None]:
    """Connect to the configured Ray cluster, or start one on this machine's loopback.

    Without the address `local` Ray would connect to the cluster of `$RAY_ADDRESS`, or to one that runs here.
    Raises UserError if Ray does not start, or the cluster does not answer.
    """
    import ray
    from omegaconf import OmegaConf
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    options: Any = OmegaConf.to_container(composed.ray_kwargs.ray_init, resolve=True)
    runtime: Any = OmegaConf.to_container(OmegaConf.create(get_ppo_ray_runtime_env(composed)))
    from_user = options.pop("runtime_env", None) or {}
    variables = {**runtime.get("env_vars", {}), **environment, **(from_user.get("env_vars") or {})}
    address = options.get("address")
    if address is None:
        options |= {"address": "local", "_node_ip_address": "127.0.0.1"}
    else:
        options = {"address": address}
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            **options, runtime_env={**runtime, **from_user, "env_vars": variables}, namespace=namespace,
            log_to_driver=logging.getLogger("srl").isEnabledFor(logging.DEBUG), logging_level=logging.ERROR,
        )  # fmt: skip
        signal.signal(signal.SIGTERM, on_sigterm)  # Ray's would end this process with another exit code
    except Exception as error:
        what = f"no Ray cluster answers at {address}" if address else "Ray does not start on this machine"
        raise UserError(f"{what}: {first_line(error)}", key="cluster.address") from error
    try:
        yield
    finally:
        with suppress(Exception):
            ray.shutdown()


class Runner:
    """A plain class, of which the launcher makes a Ray actor: the trainer's process."""

    def run(self, composed: DictConfig, run: Path, config: Config, splits: Splits) -> None:
        """Set up verl's parts in verl's order (its `TaskRunnerV1.run`), and train to the end of the run."""
        import ray
        import transfer_queue as tq
        from omegaconf import OmegaConf
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ

        from srl.train.verl.trainer import SearchTrainer
        from srl.train.verl.workers import register

        register()
        with suppress(ValueError):
            ray.get_actor("TransferQueueController", namespace="transfer_queue")
            raise UserError(
                "another run of verl uses this Ray cluster, which can queue the episodes of one run only",
                key="cluster.address", hint="wait for its end, or give this run a cluster of its own",
            )  # fmt: skip
        composed.transfer_queue.enable = True
        OmegaConf.resolve(composed)
        tq.init(composed.transfer_queue)
        try:
            trainer = SearchTrainer(composed, run, config, splits)
            trainer.init()
            manager = AgentLoopManagerTQ.create(
                config=composed,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(manager)
        finally:
            tq.close()
