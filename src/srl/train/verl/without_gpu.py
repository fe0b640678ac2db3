"""verl on a machine without a GPU: everything that it needs, and that no other machine does.

Settings, a platform of tensors on the CPU, a rollout server around our torch engine, patches of verl and of
vLLM's build for CPUs. `srl.train.verl.job.device_support` loads this module by name, verl `ServerAdapter` by
its class path, and vLLM `plugin` by an entry point. It imports neither Ray nor verl, which saves a rollout
server's process ten seconds.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from importlib import metadata
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from srl.rollout.delivery import Sample, check_held, sampled
from srl.rollout.engine import Sampling
from srl.train.verl.job import RUN_VARIABLE, TORCH, Job, Settings, model_config
from srl.train.verl.patches import Patch, put, replace

if TYPE_CHECKING:
    from srl.config import Config

ENVIRONMENT = {"VERL_PLATFORM": "cpu", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Selects our platform; without the second variable all processes of vLLM bind to the same core."""
NAME = "cpu"
_ROLLOUT = "actor_rollout_ref.rollout"
_FSDP = ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")


def settings(config: Config, job: Job) -> Settings:
    """Values of verl's configuration. Ray is told to count each worker as a GPU, and looks for none."""
    from srl.config.cross_checks import algorithm_plugin

    sizes = model_config(config.model.path)
    text = sizes.get("text_config", sizes)
    rows = max(text.get("vocab_size", 0), text.get("intermediate_size", 0))
    largest = -(-4 * rows * text.get("hidden_size", 0) // 2**20)  # MiB of a weight, which verl does not cut
    networks = _FSDP if algorithm_plugin(config.algorithm.name).needs_critic else _FSDP[:2]
    values: Settings = {
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "actor_rollout_ref.actor.use_torch_compile": False,
        **{f"{network}.use_torch_compile": False for network in networks},
        f"{_ROLLOUT}.load_format": "auto", f"{_ROLLOUT}.free_cache_engine": False,
        f"{_ROLLOUT}.enforce_eager": True, f"{_ROLLOUT}.enable_sleep_mode": False,
        f"{_ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": max(64, largest),
    }  # fmt: skip
    if config.cluster.address is None:
        values["ray_kwargs.ray_init.num_cpus"] = 16 + 8 * job.gpus_per_node
        values["ray_kwargs.ray_init.num_gpus"] = job.gpus_per_node
    if config.cluster.rollout == "vllm":  # which would take a share of the memory
        values[f"{_ROLLOUT}.engine_kwargs.vllm.kv_cache_memory_bytes"] = 2**30
    return values


def install() -> None:
    """Register platform, engines and rollout with verl. Idempotent; before verl's workers are imported."""
    vllm_cpu_counts_as_vllm()

    from verl.plugin.platform import PlatformRegistry

    if PlatformRegistry.get(NAME) is None:
        PlatformRegistry.register(platform=NAME)(_platform())

    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

    for kind, engine in (("language_model", FSDPEngineWithLMHead), ("value_model", FSDPEngineWithValueHead)):
        engines = EngineRegistry._engines.get(kind, {})
        missing = [backend for backend in ("fsdp", "fsdp2") if NAME not in engines.get(backend, {})]
        EngineRegistry.register(model_type=kind, backend=missing, device=NAME)(engine)

    from verl.workers.rollout import base, replica

    base._ROLLOUT_REGISTRY[TORCH, "async"] = f"{__name__}.ServerAdapter"
    replica.RolloutReplicaRegistry.register(
        TORCH, lambda: type("TorchReplica", (TorchReplica, replica.RolloutReplica), {})
    )


def _platform() -> type:
    """A platform of tensors on the CPU, with gloo between processes. Every call that it does not name does
    nothing: there is no device with memory, a profiler or a queue.

    `GPU` is the resource that Ray counts, since verl counts GPUs and NPUs only. It is never detected, only
    selected by name: no other program's processes should use it.
    """
    from verl.plugin.platform import PlatformBase

    def seed(self: object, seed: int) -> None:
        torch.manual_seed(seed)

    answers = {
        "is_available": True, "is_platform_available": False, "device_count": 1, "is_ipc_supported": False,
        "current_device": torch.device(NAME), "get_device_capability": (None, None),
        "communication_backend_name": "gloo", "visible_devices_envvar": "CUDA_VISIBLE_DEVICES",
        "ray_resource_name": "GPU", "ray_noset_envvars": ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"],
        "nvtx_range": nullcontext(),
    }  # fmt: skip
    methods = {name: _answer(answers.get(name)) for name in {*PlatformBase.__abstractmethods__, *answers}}
    own = {"device_name": NAME, "vendor_name": NAME, "device_module": _device_module(), "manual_seed": seed}
    return type("CPUPlatform", (PlatformBase,), {**methods, **own, "manual_seed_all": seed})


def _answer(value: object) -> Any:
    return lambda *_, **__: value


def _device_module() -> ModuleType:
    """The module verl uses in place of `torch.cuda`: `torch.cpu`, with the functions it lacks."""
    module = ModuleType(f"{__name__}.device")
    nothing = ("empty_cache", "ipc_collect", "set_per_process_memory_fraction")
    no_bytes = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    vars(module).update(
        {name: getattr(torch.cpu, name) for name in torch.cpu.__all__}
        | dict.fromkeys(nothing, _answer(None)) | dict.fromkeys(no_bytes, _answer(0)),
        mem_get_info=_answer((0, 0)), get_device_name=_answer(NAME),
        get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
    )  # fmt: skip
    return module


class TorchServer:
    """One copy of the policy on the CPU; `TorchReplica` makes a Ray actor of it. Each turn is one request."""

    def __init__(
        self, model: str, tokenizer: str, max_num_seqs: int, max_model_len: int, dtype: str = "float32",
        trust_remote_code: bool = False,
    ) -> None:  # fmt: skip
        from srl.models.load import load_model, load_tokenizer
        from srl.rollout.codec import Codec
        from srl.rollout.torch_engine import TorchEngine

        policy = load_model(model, dtype=dtype, device=NAME, trust_remote_code=trust_remote_code)
        words, _ = load_tokenizer(tokenizer, trust_remote_code)
        eos = getattr(policy.generation_config, "eos_token_id", None)
        codec = Codec(words, [eos] if isinstance(eos, int) else eos or [])
        policy.requires_grad_(False)
        self.engine = TorchEngine(policy, codec, max_num_seqs=max_num_seqs, max_model_len=max_model_len)
        self.global_steps: int | None = None
        self.numbers = count()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> Any:
        """One turn, as `VerlEngine` requests it, with the fields of verl's `TokenOutput`."""
        step, name = self.global_steps, f"{request_id}/{next(self.numbers)}"
        sampling = Sampling(
            max_tokens=sampling_params["max_tokens"], temperature=sampling_params["temperature"],
            top_p=sampling_params["top_p"], stop=tuple(sampling_params["stop"]),
            key=tuple(sampling_params["srl_key"]),
        )  # fmt: skip
        try:
            turn = await self.engine.generate(name, [int(token) for token in prompt_ids], sampling)
        finally:
            self.engine.finish(name)
        return SimpleNamespace(
            token_ids=list(turn.token_ids), log_probs=list(turn.logprobs), stop_reason="completed",
            extra_fields={"global_steps": step}, routed_experts=None,
            num_preempted=None,
        )  # fmt: skip

    async def update_weights(self, state: Mapping[str, NDArray[Any]], global_steps: int | None) -> None:
        """Generate with the weights of step `global_steps` from now on, arrays made by `as_array`."""
        with warnings.catch_warnings(action="ignore"):  # they are in read-only shared memory
            tensors = {name: torch.from_numpy(array) for name, array in state.items()}
        self.engine.sync(tensors.items())
        self.global_steps = global_steps

    async def check_delivery(self, sample: Sample) -> None:
        """Raises NotDelivered where the engine holds other weights than the `sample` of the trainer's."""
        check_held(sample, self.engine.digests(sample))

    async def sleep(self) -> None:
        """Drop the KV cache. The weights stay: they are the only copy between two updates."""
        self.engine.sleep()

    async def wake_up(self, tags: Any = None) -> None:
        """Nothing: memory is allocated on use."""


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array: Ray passes arrays on without a copy, tensors take 40 times as long."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


class TorchReplica:
    """One server for each training worker, on the same node; `install` adds verl's base class."""

    async def launch_servers(self: Any) -> None:
        """Start the server, which loads the model."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        rollout, model = self.config, self.model_config
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        server: Any = ray.remote(TorchServer).options(
            num_cpus=0,  # it works while the training worker waits
            name=f"{TORCH}_server_{self.replica_rank}",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            max_concurrency=self.max_concurrency,
        ).remote(
            model.path, model.get("tokenizer_path") or model.path, rollout.max_num_seqs,
            rollout.max_model_len or rollout.prompt_length + rollout.response_length, rollout.dtype,
            bool(model.get("trust_remote_code")),
        )  # fmt: skip
        await server.__ray_ready__.remote()
        self.servers, self._server_handle = [server], server
        self._server_address = f"{TORCH}_server_{self.replica_rank}"  # by which verl's client knows it


class ServerAdapter:
    """The training worker's side of the rollout: it sends the weights."""

    def __init__(self, *args: Any, replica_rank: int = -1, **options: Any) -> None:
        self.rank = replica_rank if replica_rank >= 0 else int(os.environ["RANK"])

    @property
    def server(self) -> Any:
        """The server's actor, which starts after this worker."""
        import ray

        return ray.get_actor(f"{TORCH}_server_{self.rank}")

    async def resume(self, tags: list[str]) -> None:
        await self.server.wake_up.remote(tags=tags)

    async def release(self) -> None:
        await self.server.sleep.remote()

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None, **options: Any
    ) -> None:
        """Send the server all weights. Every rank must call this: a sharded tensor is gathered from all."""
        sample: dict[str, Any] = {}
        state = {name: as_array(tensor) for name, tensor in sampled(weights, sample)}
        await self.server.update_weights.remote(state, global_steps)
        await self.server.check_delivery.remote(sample)


def process_group_has_one_backend() -> None:
    """Name the one backend of the process group once."""
    from verl.utils import distributed

    join = distributed.initialize_global_process_group_ray
    replace(distributed, join.__name__, wraps(join)(partial(join, backend="cpu:gloo")))


def reference_is_not_offloaded() -> None:
    """Build the reference without offloading."""
    from verl.workers.engine.fsdp import transformer_impl

    put(transformer_impl, "CPUOffloadPolicy", _answer(None))


def vllm_cpu_is_installed() -> bool:
    """Whether the installed module `vllm` is the build for CPUs, the package `vllm-cpu`."""
    is_installed = [bool(list(metadata.Distribution.discover(name=name))) for name in ("vllm", "vllm-cpu")]
    return is_installed == [False, True]


def vllm_cpu_counts_as_vllm() -> None:
    """Answer the version of `vllm-cpu` for `vllm`, with `+cpu`, by which vLLM recognises its platform.

    Must run before either of verl's modules is imported.
    """
    original = metadata.version
    if hasattr(original, "__wrapped__") or not vllm_cpu_is_installed():
        return

    @wraps(original)
    def version(distribution_name: str) -> str:
        return f"{original('vllm-cpu')}+cpu" if distribution_name == "vllm" else original(distribution_name)

    metadata.version = version


def packed_weights_are_kept() -> None:
    """Keep a linear layer's weight when it is packed, so that it can be loaded and packed again."""
    from vllm.model_executor.layers import utils

    original = utils.dispatch_cpu_unquantized_gemm
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def dispatch(layer: object, remove_weight: bool) -> None:
        original(layer, remove_weight=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def plugin() -> None:
    """The entry point in `vllm.general_plugins`, which vLLM calls in all its processes: for runs of ours."""
    if os.environ.get(RUN_VARIABLE) and vllm_cpu_is_installed():
        packed_weights_are_kept()


PATCHES = (
    Patch(
        process_group_has_one_backend,
        "utils/distributed.py, initialize_global_process_group_ray",
        "It names a backend for the CPU and one for the device. If both are the CPU, torch refuses: "
        '"Duplicate device type cpu in backend string".',
    ),
    Patch(
        reference_is_not_offloaded,
        "workers/engine/fsdp/transformer_impl.py, FSDPEngine._build_fsdp_module",
        "FSDP2 offloads the reference to pinned memory, which without a GPU raises "
        '"Cannot access accelerator device when none is available".',
    ),
)
VLLM_PATCHES = (
    Patch(
        vllm_cpu_counts_as_vllm,
        "third_party/vllm/__init__.py and workers/rollout/vllm_rollout/__init__.py",
        "Both read the version of the package vllm, and raise if vllm-cpu is what is installed.",
    ),
    Patch(
        packed_weights_are_kept,
        "vllm/model_executor/layers/utils.py, dispatch_cpu_unquantized_gemm (of vLLM)",
        "It packs each linear layer's weight for its kernel and drops the parameter. Loading the next "
        "weights fails with \"'Parameter' object has no attribute 'weight_loader'\", and the trainer hangs.",
        "none up to vllm-cpu 0.30.0",
    ),
)
"""With the package vllm-cpu only: applied by `install`, and by vLLM's entry point."""
