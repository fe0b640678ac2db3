"""Three steps of our trainer as on a GPU: `python verl_gpu_steps.py FOLDER`, where a run's configuration is.

Of verl everything between the trainer and the engine is real: the manager of weights, the worker's
`update_weights`, vLLM's replica, server and adapter, and the sender and receiver of buckets. Stand-ins are
vLLM itself, Ray, and what computes. In the third step vLLM loses the new weights. `answer.json` has what the
engine was asked, in order, and what arrived.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Coroutine, Iterator
from importlib import machinery, metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from srl.rollout.delivery import NotDelivered

JOB = f"test{os.getpid()}"
LOST = 3
"""The step whose weights vLLM loses."""
BUCKET = 2**18
"""Numbers of four bytes that a bucket holds."""
SENT = (
    ("first", 200_000, torch.float32), ("fills the bucket", BUCKET - 200_000, torch.float32),
    ("odd", 3, torch.bfloat16), ("aligned", 5, torch.float32), ("a bucket", BUCKET, torch.float32),
    ("half a bucket", BUCKET, torch.bfloat16), ("another half", BUCKET, torch.bfloat16),
    ("last", 1, torch.float32),
)  # fmt: skip
"""The weights of the trainer: name, size and dtype."""


class StandIn(ModuleType):
    """A module in which every name is a class that keeps what it is given."""

    __version__ = "0.24.0"
    __path__ = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def keep(self: Any, *ignored: Any, **given: Any) -> None:
            self.__dict__.update(given)

        made = type(name, (), {"__init__": keep, "__getattr__": lambda self, name: None})
        setattr(self, name, made)
        return made


class VllmFinder:
    """Finds a stand-in for every module of vLLM."""

    def find_spec(self, name: str, *_: Any) -> machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "vllm"
        return machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.model_executor.model_loader.utils":
            module.process_weights_after_loading = lambda *_: None
        if module.__name__ == "vllm.config.lora":
            module.MaxLoRARanks = __import__("typing").Literal[1, 8, 16]


class Engine:
    """In vLLM's place: what it is asked goes into `story`; asked for what sleeps, it fails."""

    def __init__(self, extension: Any) -> None:
        self.extension, self.story, self.awake = extension, list[str](), {"weights", "kv_cache"}

    async def sleep(self, level: int) -> None:
        self.story.append(f"sleep {level}")
        self.awake = set()

    async def wake_up(self, tags: list[str]) -> None:
        self.story.append(f"wake {' '.join(tags)}")
        self.awake |= set(tags)

    async def collective_rpc(self, method: str, args: Any, kwargs: Any, timeout: Any) -> None:
        try:
            assert self.awake == {"weights"}, f"{method} while {self.awake} are awake"
            self.story.append(method.partition("_")[0])
            await asyncio.to_thread(getattr(self.extension, method), *args, **kwargs or {})
        except NotDelivered as error:  # vLLM hands on what an error says
            raise RuntimeError(str(error)) from None
        except BaseException:  # the sender would wait for ever
            traceback.print_exc()
            os._exit(1)

    async def list_loras(self) -> set[int]:
        return self.extension.loras

    async def generate(self, lora_request: Any, **request: Any) -> Any:
        assert self.awake == {"weights", "kv_cache"}, f"a turn while {self.awake} are awake"
        with_lora = " with the adapter" if lora_request is not None else ""
        if self.story[-1] != f"generate{with_lora}":
            self.story.append(f"generate{with_lora}")
        output = SimpleNamespace(token_ids=[3], logprobs=[{3: SimpleNamespace(logprob=-1.0)}],
                                 finish_reason="stop")  # fmt: skip
        yield SimpleNamespace(outputs=[output], num_cached_tokens=0)

    def __getattr__(self, name: str) -> Any:
        async def nothing(**_: Any) -> None:
            """For resets of caches, and waiting for turns."""

        return nothing


class Layer(torch.nn.Module):
    """A linear layer of vLLM's (8, 16), with room for an adapter of rank 8."""

    tp_size, output_partition_sizes, params_dtype = 1, (8,), torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.quant_method = torch.zeros(8, 16), SimpleNamespace(apply=torch.nn.functional.linear)
        self.quant_method.apply = lambda layer, states: states @ layer.weight.T
        self.lora_a_stacked, self.lora_b_stacked = [torch.zeros(1, 1, 8, 16)], [torch.zeros(1, 1, 8, 8)]


class Model(torch.nn.Module):
    """vLLM's model: it keeps what it is given, and has one layer. From step `LOST` on the layer takes no more
    weights."""

    def __init__(self) -> None:
        super().__init__()
        self.got, self.model = dict[str, torch.Tensor](), SimpleNamespace(layers=())
        self.layers = torch.nn.ModuleList([torch.nn.ModuleDict({"o_proj": Layer()})])
        self.layer = self.layers[0]["o_proj"]

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.got |= {name: tensor.clone() for name, tensor in weights}
        places = {
            ".lora_A": self.layer.lora_a_stacked[0][0, 0],
            ".lora_B": self.layer.lora_b_stacked[0][0, 0],
        }
        for name, tensor in self.got.items():
            if tensor.ndim == 2 and int(tensor[0, 0]) < LOST:
                factor = 2 if ".lora_B" in name else 1
                places.get(name[-14:-7], self.layer.weight).copy_(tensor * factor)


def extension() -> Any:
    """Our part of vLLM's worker, around verl's."""
    from srl.train.verl.vllm_delivery import CheckedWorker

    made = object.__new__(CheckedWorker)
    config = SimpleNamespace(
        speculative_config=None, quant_config=None, parallel_config=None, model_config=None
    )  # fmt: skip
    made.model_runner = SimpleNamespace(model=Model(), vllm_config=config)
    made.device, made.local_rank, made._is_qat_model, made._is_modelopt_qat = (
        torch.device("cpu"),
        0,
        False,
        False,
    )
    made.loras = set()

    def add_lora(request: Any) -> None:
        made.loras.add(request.lora_int_id)
        made.model_runner.model.load_weights(request.lora_tensors.items())

    made.add_lora, made.remove_lora = add_lora, made.loras.discard
    return made


class Handle:
    """A server as Ray hands it out: its methods run in a loop of its own."""

    def __init__(self, server: Any) -> None:
        self.server, self.loop = server, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def __getattr__(self, name: str) -> Any:
        async def call(arguments: Any, named: Any) -> Any:
            answer = getattr(self.server, name)(*arguments, **named)
            return await answer if asyncio.iscoroutine(answer) else answer

        def remote(*arguments: Any, **named: Any) -> Any:
            return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call(arguments, named), self.loop))

        return SimpleNamespace(remote=remote)


class Weights:
    """The training engine of one worker: `step` is in every weight."""

    is_param_offload_enabled = False

    def __init__(self, lora: bool) -> None:
        self.lora, self.step = lora, 0

    def get_per_tensor_param(self, **_: Any) -> tuple[Any, Any]:
        layer = (
            "base_model.model.layers.0.o_proj.lora_A.weight",
            "base_model.model.layers.0.o_proj.lora_B.weight",
        )
        shapes = {layer[0]: (8, 16), layer[1]: (8, 8)} if self.lora else {"layers.0.o_proj.weight": (8, 16)}
        sent = [(name, torch.full((size,), self.step, dtype=dtype)) for name, size, dtype in SENT]
        sent += [(name, torch.full(shape, float(self.step))) for name, shape in shapes.items()]
        return iter(sent), {"r": 8, "lora_alpha": 16} if self.lora else None


def ready(answer: Any) -> Any:
    """In place of `ray.get`."""
    if isinstance(answer, Coroutine):
        return threaded(answer)
    return answer


def threaded(work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` answers; it runs in a thread, since a loop may be running in this one."""
    answers: list[Any] = []

    def run() -> None:
        try:
            answers.append(asyncio.run(work))
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(answers[0], BaseException):
        raise answers[0]
    return answers[0]


def main(folder: Path) -> None:
    sys.meta_path.insert(0, VllmFinder())
    version = metadata.version
    metadata.version = lambda name: StandIn.__version__ if name == "vllm" else version(name)

    import ray

    ray.get = ready
    ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: JOB)
    ray.util.get_node_ip_address = lambda: "127.0.0.1"

    from srl.train.verl import without_gpu

    without_gpu.install()

    from verl.utils.config import omega_conf_to_dataclass

    from srl.config import load_saved
    from srl.train.verl.config_check import compose
    from srl.train.verl.job import Job

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    config = load_saved(folder)
    composed = compose(config, Job(folder, cpu=False, gpus_per_node=1))
    composed.trainer.save_freq = -1
    composed.actor_rollout_ref.model.tokenizer_path = composed.actor_rollout_ref.model.path
    composed.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = 1
    rollout = composed.actor_rollout_ref.rollout
    model = omega_conf_to_dataclass(composed.actor_rollout_ref.model)

    from verl.checkpoint_engine.base import CheckpointEngineManager
    from verl.workers.engine_workers import ActorRolloutRefWorker
    from verl.workers.rollout import base
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    server = vLLMHttpServer(
        config=rollout, model_config=model, rollout_mode=RolloutMode.HYBRID, workers=[], replica_rank=0,
        node_rank=0, gpus_per_node=1, nnodes=1, cuda_visible_devices="0",
    )  # fmt: skip
    base._ROLLOUT_REGISTRY["vllm", "async"] = "srl.train.verl.vllm_delivery.CheckedAdapter"
    server.engine = engine = Engine(extension())
    handle, replica = Handle(server), object.__new__(vLLMReplica)
    replica.servers = [handle]
    ray.get_actor = lambda name: handle
    weights = Weights(config.model.lora_rank > 0)
    worker = SimpleNamespace(
        config=composed.actor_rollout_ref, actor=SimpleNamespace(engine=weights), layered_summon=False,
        rollout=get_rollout_class("vllm")(omega_conf_to_dataclass(rollout), model, None),
        peft_merge=False, base_sync_done="dummy" not in rollout.load_format,
    )  # fmt: skip
    group = SimpleNamespace(
        update_weights=lambda **named: ActorRolloutRefWorker.update_weights(worker, **named)
    )
    checkpoints = omega_conf_to_dataclass(rollout.checkpoint_engine)
    checkpoints.backend = "naive"
    manager = CheckpointEngineManager(checkpoints, group, [replica])
    lost = ""
    try:
        train(config, composed, manager, handle, weights)
    except NotDelivered as error:
        lost = str(error)
    got = [
        [name, len(tensor), str(tensor.dtype), tensor.unique().tolist()]
        for name, tensor in engine.extension.model_runner.model.got.items()
        if tensor.ndim == 1
    ]
    answer = {"story": engine.story, "got": got, "version": server.global_steps, "too_large": too_large(),
              "lost": lost}  # fmt: skip
    (folder / "answer.json").write_text(json.dumps(answer))


def too_large() -> str:
    """What verl says of a tensor that is larger than a bucket of shared memory."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (
        BucketedWeightReceiver,
        BucketedWeightSender,
    )

    handle = f"ipc:///tmp/{JOB}.sock"
    receiver = BucketedWeightReceiver(handle, torch.device("cpu"), use_shm=True)
    threading.Thread(target=receiver.receive_weights, args=(print,), daemon=True).start()
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    try:
        asyncio.run(sender.async_send_weights([("large", torch.zeros(BUCKET + 1))]))
    except AssertionError as error:
        return str(error)
    return ""


def train(config: Any, composed: Any, manager: Any, handle: Handle, weights: Weights) -> None:
    """The start, the steps and the validations of our trainer, in verl's own loop."""
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from srl.train.verl.trainer import SearchTrainer

    trainer_base.tq = SimpleNamespace(kv_batch_put=lambda **_: None, kv_clear=lambda **_: None)

    class Loops:
        """In place of the rollout workers: they generate what they are given, at once."""

        agent_loop_workers = ()

        def generate_sequences(self, batch: Any) -> None:
            async def turns() -> None:
                for name in batch["uid"]:
                    params = {"max_tokens": 4, "logprobs": True, "temperature": 1.0}
                    await handle.generate.remote(request_id=name, prompt_ids=[1, 2], sampling_params=params)

            threaded(turns())

    class Trainer(SearchTrainer):
        """Without what computes, checks workers, and reads data."""

        def __init__(self) -> None:
            for name in ("_balance_batch", "_compute_old_log_prob", "_compute_values", "_compute_advantage"):
                setattr(self, name, lambda batch, metrics: batch)

        def _update_actor(self, batch: Any, metrics: Any) -> Any:
            weights.step = self.global_steps
            return batch

        def _next_train_batch(self, num_prompts: int | None = None) -> Any:
            return {"uid": ["a", "b"]}

        def _evaluate(self, phase: Any) -> dict[str, float]:
            self.agent_loop_manager.generate_sequences({"uid": [phase]})
            return {f"{phase}/em": 0.0}

        def _compute_metrics(self, *_: Any, **__: Any) -> None: ...

        def _check_workers(self) -> None: ...

    class Told:
        """The log writer, which has heard of nothing bad."""

        def __getattr__(self, name: str) -> Any:
            answers = {"failed_episodes": SimpleNamespace(failed=0, episodes=2)}
            return SimpleNamespace(remote=lambda *_: answers.get(name))

    made = Trainer()
    rows = KVBatchMeta(keys=["a", "b"], tags=[{}, {}], partition_id="train")
    vars(made).update(
        config=composed, srl=config, run=Path(), log_actor=Told(), splits=SimpleNamespace(val=[1], test=[1]),
        health=SimpleNamespace(check=lambda: None), checkpoint_manager=manager, trainer_mode="sync",
        use_critic=False, use_reference_policy=False, total_training_steps=3, steps_per_epoch=3,
        parameter_sync_step=1, global_steps=0, _shutdown_dump_executor=lambda: None,
        reward_loop_manager=SimpleNamespace(reward_loop_worker_handles=[]),
        replay_buffer=SimpleNamespace(sample=lambda **_: (rows, {}), failure_keys={}),
    )  # fmt: skip
    manager.sleep_replicas()  # as verl does before it loads a checkpoint
    made.on_init_end()
    made.fit(Loops())


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # the server's threads go on
