"""verl's rollout servers as an engine, without a trainer: an evaluation on many GPUs.

Each GPU, or group of `cluster.tensor_model_parallel_size`, has a copy of the model, which its server loads
itself. Episodes run in the process that evaluates, as with any engine. verl's client sends an episode to the
server with the fewest open turns, and its later turns to the same one.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from srl.config import Config, save_config
from srl.errors import UserError
from srl.models.hub import hub_name
from srl.rollout.codec import Codec
from srl.rollout.engine import Completion, Engine, Sampling
from srl.train.load_components import Generation
from srl.train.load_protocol import load_codec
from srl.train.make_missing import Note
from srl.train.verl.config_check import server_config
from srl.train.verl.engine import VerlEngine, eos_ids
from srl.train.verl.job import TORCH
from srl.train.verl.launch import check_installed, job_of, ray_cluster, set_environment
from srl.workspace import Workspace

if TYPE_CHECKING:
    from omegaconf import DictConfig

FOLDER = ".servers-"
"""The start of the directory in the workspace that holds configuration and tokenizer while servers run."""

Ask = Callable[..., Awaitable[Any]]
"""The method `generate` of verl's client."""


@dataclass(slots=True)
class ServersEngine(Engine):
    """The rollout servers as one engine. `begin` starts them; what ends them goes on the stack.

    Raises UserError where a server has died, or has not answered a turn for `patience_s` seconds.
    """

    begin: Callable[[ExitStack], Ask]
    codec: Codec
    backend: str
    patience_s: float
    _ask: Ask | None = None
    _ends: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        """Start the servers, once. Raises UserError."""
        if self._ask is None:
            with ExitStack() as ends:
                self._ask = self.begin(ends)
                self._ends = ends.pop_all()

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        from ray.exceptions import RayError

        from srl.train.verl.failures import reason

        assert self._ask is not None, "the servers are started before the first episode"
        turn = VerlEngine(self._ask, self.codec, self.backend)
        try:
            async with asyncio.timeout(self.patience_s):
                return await turn.generate(request_id, token_ids, sampling)
        except TimeoutError:
            what = f"no rollout server has answered for {self.patience_s:g} s (cluster.watchdog_s)"
            raise UserError(what, key="cluster.watchdog_s") from None
        except RayError as error:
            raise UserError(reason(error)) from error

    def close(self) -> None:
        """End the servers, and Ray where it was started for them."""
        self._ends.close()
        self._ask = None


def load_servers(config: Config, workspace: Workspace, note: Note) -> Generation:
    """Rollout servers of the model `config.model.path`, which start when they are needed.

    All checks are made that start no process. Raises UserError.
    """
    job = job_of(config, Path())
    rollout = server_config(config, job).actor_rollout_ref.rollout
    check_installed(config)
    if config.model.path is None:
        raise UserError("which model? name its directory or run")
    codec = load_codec(config.model, eos_ids(config), note)
    copies = int(rollout.nnodes * rollout.n_gpus_per_node // rollout.tensor_model_parallel_size)

    def begin(ends: ExitStack) -> Ask:
        """Start Ray and the servers, which read configuration and tokenizer from a directory."""
        workspace.root.mkdir(parents=True, exist_ok=True)
        folder = Path(ends.enter_context(TemporaryDirectory(prefix=FOLDER, dir=workspace.root)))
        save_config(folder, config)
        job = job_of(config, folder)
        codec.tokenizer.save_pretrained(job.tokenizer)
        variables = set_environment(config, job, workspace)
        composed = server_config(config, job)
        note(f"starting {copies} rollout servers on verl, each with a copy of the model")
        ends.enter_context(ray_cluster(composed, folder.name, variables, quiet=False))
        return start_servers(composed)

    engine = ServersEngine(begin, codec, rollout.name, config.cluster.watchdog_s)
    name = hub_name(config.model.path) or config.model.path
    return Generation(engine, codec, name, start=engine.start, copies=copies)


def start_servers(composed: DictConfig) -> Ask:
    """Start verl's servers, and check that they have registered; what asks them. Raises UserError.

    What verl prints is dropped: stdout is for results.
    """
    from srl.train.verl.failures import reason
    from srl.train.verl.workers import check_registered, register

    register()

    from verl.workers.rollout.llm_server import LLMServerManager

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            manager = LLMServerManager.create(config=composed)
    except Exception as error:
        raise UserError(f"the rollout servers do not start: {reason(error)}") from error
    replicas = manager.get_replicas()
    workers = [worker for replica in replicas for worker in replica.workers]
    if composed.actor_rollout_ref.rollout.name != TORCH:  # our own server imports no verl
        workers += [server for replica in replicas for server in replica.servers]
    check_registered(workers)
    ask: Ask = manager.get_client().generate
    return ask
