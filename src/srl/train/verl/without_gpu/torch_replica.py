"""The torch engine as a rollout of verl: a replica starts its servers, an adapter sends them weights."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from srl.errors import UserError
from srl.train.verl.delivery import deliver
from srl.train.verl.job import TORCH
from srl.train.verl.without_gpu.torch_server import ServerOptions, TorchServer, as_array


def server_name(rank: int) -> str:
    """The name of a replica's Ray actor, by which the training worker finds it."""
    return f"{TORCH}_server_{rank}"


class TorchReplica(RolloutReplica):
    """One server for each training worker: a process on the same node."""

    def __init__(self, replica_rank: int, *args: Any, **options: Any) -> None:
        super().__init__(replica_rank, *args, **options)
        if self.world_size != 1:
            raise UserError(
                f"cluster.rollout=torch keeps each copy of the model whole and cannot split one over "
                f"{self.world_size} workers: set cluster.tensor_model_parallel_size=1"
            )
        if self.is_reward_model or self.is_teacher_model:
            raise UserError("cluster.rollout=torch generates with the policy only, not with another model")

    async def launch_servers(self) -> None:
        """Start the server, which loads the model."""
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server = (
            ray.remote(TorchServer)
            .options(
                num_cpus=0,  # it works while the training worker waits
                name=server_name(self.replica_rank),
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
                max_concurrency=self.max_concurrency,
            )
            .remote(server_options(self.config, self.model_config))
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle, self._server_address = server, server_name(self.replica_rank)


def server_options(rollout: Any, model: Any) -> ServerOptions:
    """From verl's sections `rollout` and `model`; threads are `rollout.engine_kwargs.srl_torch.threads`."""
    longest = rollout.max_model_len or rollout.prompt_length + rollout.response_length
    return ServerOptions(
        model=model.path,
        tokenizer=model.get("tokenizer_path") or model.path,
        max_num_seqs=rollout.max_num_seqs,
        max_model_len=longest,
        dtype=rollout.dtype,
        threads=(rollout.engine_kwargs.get(TORCH) or {}).get("threads"),
        trust_remote_code=bool(model.get("trust_remote_code")),
        seed=rollout.seed,
    )


class ServerAdapter(BaseRollout):
    """The training worker's side of the rollout: it sends the weights."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, *args: Any, replica_rank: int = -1
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])
        self._server: Any = None

    @property
    def server(self) -> Any:
        """The server's actor. It starts after this worker, so it is looked up on first use."""
        if self._server is None:
            self._server = ray.get_actor(server_name(self.replica_rank))
        return self._server

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        *,
        global_steps: int | None = None,
        peft_config: Any = None,
        **options: Any,
    ) -> None:
        """Send the server all weights. Every rank must call this: a sharded tensor is gathered from all."""
        if wire_format != "named_tensors" or peft_config is not None:
            what = "an adapter beside the weights" if peft_config is not None else wire_format
            raise UserError(
                f"cluster.rollout=torch takes whole weights, not {what}; "
                "for LoRA set verl.actor_rollout_ref.model.lora.merge=true"
            )

        async def send(named: Iterable[tuple[str, torch.Tensor]]) -> None:
            state = {name: as_array(tensor) for name, tensor in named}
            await self.server.update_arrays.remote(state, global_steps)

        await deliver(weights, send, self.server.check_delivery.remote)
