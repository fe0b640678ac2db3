"""The torch engine as one of verl's rollout servers: prompts in, tokens out, new weights each step.

A plain class, of which `torch_replica` makes a Ray actor. It imports neither Ray nor verl, which saves ten
seconds of each start.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from srl.errors import SrlError
from srl.rollout.delivery import Sample, check_held
from srl.rollout.engine import Completion, Engine, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_READ = ("temperature", "top_p", "max_tokens", "stop", "srl_key")
"""Sampling parameters that are used …"""
_IMPLIED = {
    "include_stop_str_in_output": (True,), "logprobs": (True, 0, 1), "top_k": (-1, 0), "n": (1,),
    "repetition_penalty": (1, None), "ignore_eos": (False,), "seed": None, "srl_request": None,
    "srl_finish": None,
}  # fmt: skip
"""… and those that may only have the value that holds anyway; None stands for any value."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a server loads, and how much it generates at once. `threads` None keeps torch's number."""

    model: str
    tokenizer: str
    max_num_seqs: int
    max_model_len: int
    dtype: str = "float32"
    threads: int | None = None
    trust_remote_code: bool = False
    seed: int = 0


@dataclass(slots=True)
class Tokens:
    """A turn, with the field names of verl's `TokenOutput`; an aborted turn has no tokens."""

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    extra_fields: dict[str, Any]
    routed_experts: None = None
    num_preempted: None = None


class TorchServer:
    """One copy of the policy on the CPU, loaded by `launch`. Each turn is one request to the engine.

    Turns that are still running when the weights change or the server goes to sleep are aborted.
    """

    model: PreTrainedModel  # from launch on
    engine: Engine

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self.global_steps: int | None = None
        self._numbers = count()
        self._open: dict[str, asyncio.Task[Completion]] = {}
        self._admits = asyncio.Event()
        self._admits.set()
        self._rejects = False

    def launch(self) -> None:
        """Load model and tokenizer. Raises UserError if there is no model."""
        from srl.models.load import load_model, load_tokenizer
        from srl.rollout.codec import Codec
        from srl.rollout.torch_engine import TorchEngine

        options = self.options
        if options.threads:
            torch.set_num_threads(options.threads)
        remote = options.trust_remote_code
        model = load_model(options.model, dtype=options.dtype, device="cpu", trust_remote_code=remote)
        tokenizer, _ = load_tokenizer(options.tokenizer, remote)
        eos = getattr(model.generation_config, "eos_token_id", None)
        codec = Codec(tokenizer, [eos] if isinstance(eos, int) else eos or [])
        self.model = model.requires_grad_(False)
        self.engine = TorchEngine(
            model, codec, max_num_seqs=options.max_num_seqs, max_model_len=options.max_model_len
        )

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **media: Any
    ) -> Tokens:
        """One turn, as verl's client requests it; `srl_stop` is why it ended (`stop`, `eos`, `length`)."""
        if any(value is not None for value in media.values()):
            raise SrlError(f"the torch rollout accepts text only, not {', '.join(media)}")
        completion, step = await self.turn(request_id, [int(token) for token in prompt_ids], sampling_params)
        if completion is None:
            return Tokens([], [], "aborted", {"global_steps": step})
        known = {"global_steps": step, "srl_stop": completion.stop_reason}
        return Tokens(list(completion.token_ids), list(completion.logprobs), "completed", known)

    async def turn(
        self, request_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> tuple[Completion | None, int | None]:
        """One turn (None if it was aborted), and the step whose weights generated it."""
        if not await self._is_admitted():
            return None, self.global_steps
        step, name = self.global_steps, f"{request_id}/{next(self._numbers)}"
        sampling = self._sampling(request_id, prompt_ids, sampling_params)
        task = asyncio.ensure_future(self.engine.generate(name, prompt_ids, sampling))
        task.add_done_callback(lambda _: self._ended(name))
        self._open[name] = task
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()  # if the caller was cancelled
        return (None if task.cancelled() else task.result()), step

    async def _is_admitted(self) -> bool:
        """Wait while generation is paused; False if requests are rejected meanwhile."""
        while not self._admits.is_set() and not self._rejects:
            await self._admits.wait()
        return self._admits.is_set()

    def _ended(self, name: str) -> None:
        del self._open[name]
        self.engine.finish(name)

    def _sampling(self, request_id: str, prompt_ids: Sequence[int], params: Mapping[str, Any]) -> Sampling:
        check_params(params)
        key = params.get("srl_key") or (self.options.seed, request_id)
        stop = params.get("stop") or ()
        return Sampling(
            max_tokens=params.get("max_tokens", self.options.max_model_len - len(prompt_ids)),
            temperature=params.get("temperature", 1.0),
            top_p=params.get("top_p", 1.0),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            key=tuple(key),
        )

    async def update_weights(self, state: Mapping[str, Tensor], global_steps: int | None = None) -> None:
        """Generate with the weights of step `global_steps` from now on. Raises SrlError, as `load_state`."""
        await self._abort()
        self.engine.sync(state.items())
        self.global_steps = self.global_steps if global_steps is None else global_steps

    async def update_arrays(self, state: Mapping[str, NDArray[Any]], global_steps: int | None) -> None:
        """`update_weights`, from arrays made by `as_array`."""
        with warnings.catch_warnings(action="ignore"):  # they are in read-only shared memory
            tensors = {name: torch.from_numpy(array) for name, array in state.items()}
        await self.update_weights(tensors, global_steps)

    async def check_delivery(self, sample: Sample) -> None:
        """Raises NotDelivered where the engine holds other weights than the `sample` of the trainer's."""
        check_held(sample, self.engine.digests(sample))

    async def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
        """Abort all running turns; new ones wait for `resume_generation`, or are rejected."""
        self._rejects = reject_request
        self._admits.clear()
        names = await self._abort()
        return {"aborted_count": len(names), "request_ids": [name.rpartition("/")[0] for name in names]}

    async def resume_generation(self) -> None:
        self._rejects = False
        self._admits.set()

    async def sleep(self, **options: Any) -> None:
        """Drop the KV cache. The weights stay: they are the only copy between two updates."""
        await self._abort()
        self.engine.sleep()

    async def clear_kv_cache(self) -> None:
        await self.sleep()

    async def release_kv_cache(self) -> None:
        await self.sleep()

    async def wake_up(self, **options: Any) -> None:
        """Nothing: memory is allocated on use."""

    async def resume_kv_cache(self) -> None:
        """Nothing, as `wake_up`."""

    async def start_profile(self, **options: Any) -> None:
        """Nothing: this server has no profiler."""

    async def stop_profile(self) -> None:
        """Nothing, as `start_profile`."""

    async def describe(self) -> dict[str, Any]:
        """Process, threads, step of the weights and number of running turns."""
        return {
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "global_steps": self.global_steps,
            "open": len(self._open),
        }

    async def _abort(self) -> list[str]:
        """Cancel every running turn; their names."""
        tasks = dict(self._open)
        for task in tasks.values():
            task.cancel()
        if tasks:
            await asyncio.wait(tasks.values())
        return list(tasks)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """The tensor as an array: Ray passes arrays on without a copy, tensors take 40 times as long."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def check_params(params: Mapping[str, Any]) -> None:
    """Raises SrlError for sampling parameters that the torch engine does not support."""
    for name, value in params.items():
        allowed = () if name not in _READ and name not in _IMPLIED else _IMPLIED.get(name)
        if allowed is not None and value not in allowed:
            raise SrlError(
                f"the torch rollout does not support sampling with {name}={value!r}; leave it out, or set "
                "cluster.rollout=vllm"
            )
