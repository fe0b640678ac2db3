"""Generation with a torch model in this process: continuous batching over the episodes that are active."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from srl.errors import SrlError, UserError
from srl.models.load import return_free_memory
from srl.rollout.choose_forward import choose_forward
from srl.rollout.codec import Codec
from srl.rollout.delivery import Sample, column_numbers, held_digests
from srl.rollout.engine import (
    Completion,
    Engine,
    LogitsNotFinite,
    Sampling,
    StopReason,
    check_turn,
)
from srl.rollout.rollout_weights import MergedLora, mkl_is_slow, onednn_linears
from srl.rollout.slot_table import Rows, SlotTable
from srl.rollout.stop_finder import StopFinder

SMALL_CACHE = 2**26
"""Bytes of a cache on a CPU that is kept while the engine sleeps: new buffers would cost more."""
ROOM = 0.8
"""On a GPU the cache, and the graphs that read it, stay if all fits into this share of the memory."""
QUIET_TICKS = 8
"""Rounds of the event loop without a call after which all episodes are assumed to wait for something."""


@dataclass(slots=True, order=True)
class _Request:
    """One turn asked for; sorts by `order`."""

    order: tuple[Any, ...]
    id: str
    token_ids: Sequence[int] = field(compare=False)
    sampling: Sampling = field(compare=False)
    future: asyncio.Future[Completion] = field(compare=False)


class TorchEngine(Engine):
    """An `Engine` that runs a causal language model in this process, on the model's device.

    An episode has a row of the table, and the slot of the cache with the same number, from its first turn to
    `finish`; at most `max_num_seqs` are under way. A turn feeds only new tokens. Waiting requests are fed
    together, when they have lost as many steps of a row as a feed costs the active ones. Each step then draws
    one token for every active row and lets the episodes run; their searches come back as new requests.

    A LoRA adapter is merged into the weights from the first turn on. Call `reset` (or `sleep`) when the
    rollout ends, also by an error, and before the weights change: it takes the adapter out again.

    `graphs` says whether decoding steps are CUDA graphs; None: on a GPU, where they can be captured and
    nothing has to be deterministic.

    With `deterministic=True` timing has no influence: rows and batches follow the order of the requests'
    keys. When turns have ended, the engine waits for the next requests of their episodes before it feeds
    anything, however long their searches take. The same episodes then go through the same batches, and on one
    thread their completions are the same bit for bit in every process. Episodes must start together or when
    others finish, and between turns an episode may wait for its search only.
    """

    same_weights = True

    def __init__(
        self,
        model: PreTrainedModel,
        codec: Codec,
        *,
        max_num_seqs: int,
        max_model_len: int,
        deterministic: bool = False,
        graphs: bool | None = None,
    ) -> None:
        self.model, self.codec = model, codec
        self.max_num_seqs, self.max_model_len = max_num_seqs, max_model_len
        self.deterministic = deterministic
        self._embedded: int = model.config.get_text_config().vocab_size
        vocabulary = max(self._embedded, len(codec.tokenizer))
        self._stops = StopFinder(codec, vocabulary)
        self._is_eos = np.isin(np.arange(vocabulary), list(codec.eos_ids))
        if deterministic and model.device.type == "cuda":
            make_cuda_deterministic()
        self._lora = MergedLora(model)
        graphs = False if deterministic else graphs
        self._forward = choose_forward(model, max_num_seqs, max_model_len, graphs=graphs)
        fast = not deterministic and model.device.type == "cpu" and mkl_is_slow()
        self._linears = onednn_linears if fast else nullcontext
        self._scheduler: asyncio.Task[None] | None = None
        self._calls = 0
        self._has_slept = False
        self._forget()

    def _forget(self) -> None:
        self._table = SlotTable(self.max_num_seqs)
        self._free = list(range(self.max_num_seqs))  # a heap: the lowest row first
        self._row_of: dict[str, int] = {}  # the episodes that hold a row
        self._open: dict[str, _Request] = {}  # turns asked for and not ended
        self._turns: dict[int, _Request] = {}  # those being generated, by row
        self._new: list[_Request] = []  # a heap: first turns, waiting for a row
        self._back: list[_Request] = []  # later turns, waiting to be fed
        self._ended = 0  # turns that have ended since requests were last fed
        self._lost_steps = 0  # steps that waiting requests have lost since then, summed over them

    def reset(self) -> None:
        """Forget every episode, and take the adapter out of the weights."""
        self._fail(RuntimeError("the engine was reset while a turn was being generated"))

    @torch.no_grad()
    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights into the model, a tied one under any of its names.

        Raises SrlError, and changes nothing, for weights of another model and tied ones that differ.
        """
        self.reset()
        own, sent, misfits = self.model.state_dict(), dict[int, Tensor](), set[str]()
        for name, weight in weights:
            fits = name in own and own[name].shape == weight.shape
            if not (fits and torch.equal(sent.setdefault(own[name].data_ptr(), weight), weight)):
                misfits.add(name)
        misfits.update(name for name, weight in own.items() if weight.data_ptr() not in sent)
        if misfits:
            names = ", ".join(sorted(misfits)[:3])
            raise SrlError(f"{len(misfits)} of the trainer's weights do not fit the rollout, such as {names}")
        for weight in own.values():
            weight.copy_(sent[weight.data_ptr()])

    def digests(self, sample: Sample) -> dict[str, str]:
        own = self.model.state_dict()
        return held_digests(
            (name, own[name][:, column_numbers(width)]) for name, ((_, width), _) in sample.items()
        )

    def sleep(self) -> None:
        self.reset()
        if not self._has_room():
            self._forward.release()
            return_free_memory()
        self._has_slept = True

    def _has_room(self) -> bool:
        """Whether the cache can stay; on a GPU beside the most that the process has needed."""
        device, size = self.model.device, self._forward.nbytes
        if device.type != "cuda":
            return size <= SMALL_CACHE
        peak = torch.cuda.max_memory_allocated(device) + size
        return self._has_slept and peak <= ROOM * torch.cuda.mem_get_info(device)[1]

    def close(self) -> None:
        self.reset()

    async def generate(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One turn of the episode `request_id`, whose ids so far are `token_ids`.

        Raises UserError if the turn does not fit `max_model_len`, has ids that the model does not embed, or
        the model raises; ValueError if the call breaks the `Engine` protocol.
        """
        self._check(request_id, token_ids, sampling)
        order = _by_key(sampling.key) if self.deterministic else (self._calls,)
        future = asyncio.get_running_loop().create_future()
        request = _Request(order, request_id, token_ids, sampling, future)
        self._open[request_id] = request
        if request_id in self._row_of:
            self._back.append(request)
        else:
            heapq.heappush(self._new, request)
        self._called()
        try:
            return await future
        except asyncio.CancelledError:
            self._abandon(request)
            raise

    def finish(self, request_id: str) -> None:
        """Free the episode's row, where it has one."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._table.clear(row)
            heapq.heappush(self._free, row)
            self._called()

    def _check(self, request_id: str, token_ids: Sequence[int], sampling: Sampling) -> None:
        check_turn(request_id, token_ids, sampling, self.max_model_len)
        if max(token_ids) >= self._embedded:
            raise UserError(
                f"token {max(token_ids)} in a prompt or passage, but the model embeds only {self._embedded}: "
                "give the model with its own tokenizer"
            )
        if request_id in self._open:
            raise ValueError(f"{request_id}: its last turn is still being generated")
        row = self._row_of.get(request_id)
        if row is not None and not self._table.is_extended_by(row, token_ids):
            raise ValueError(f"{request_id}: its ids do not begin with those of its turns so far")

    def _called(self) -> None:
        """Count a call, and start the scheduler where it is not running."""
        self._calls += 1
        if (self._scheduler is None or self._scheduler.done()) and self._can_advance():
            self._scheduler = asyncio.get_running_loop().create_task(self._serve())

    async def _serve(self) -> None:
        """Feed, draw and let the episodes run, until all of them wait for something else."""
        try:
            self._lora.merge()
            with self._linears(self.model):
                await self._let_episodes_run()
                while self._can_advance():
                    self._admit()
                    self._advance(np.flatnonzero(self._table.active))
                    self._lost_steps += self._pending()
                    await self._let_episodes_run()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, asyncio.CancelledError):  # which comes between two steps
                self._forward.release()  # the cache may be inconsistent after a failed forward
            if not isinstance(error, Exception):
                raise
        finally:
            self._scheduler = None

    async def _let_episodes_run(self) -> None:
        """Return when no episode has made a call for some rounds of the event loop."""
        quiet = 0
        while quiet < (QUIET_TICKS if self._away() else 2):
            calls = self._calls
            await asyncio.sleep(0)
            quiet = quiet + 1 if calls == self._calls else 0

    def _active(self) -> int:
        return int(np.count_nonzero(self._table.active))

    def _away(self) -> int:
        """How many episodes hold a row and are between two turns."""
        return len(self._row_of) - self._active() - len(self._back)

    def _admissible(self) -> int:
        return len(self._back) + min(len(self._new), len(self._free))

    def _pending(self) -> int:
        """The number of requests to feed; in deterministic mode the number of ended turns."""
        return self._ended if self.deterministic else self._admissible()

    def _is_due(self) -> bool:
        """Whether feeding now costs the active rows no more than the pending ones have lost."""
        active, pending = self._active(), self._pending()
        return not active or (pending > 0 and self._lost_steps >= self._forward.feed_cost * active)

    def _can_advance(self) -> bool:
        if self.deterministic and self._is_due() and self._away():
            return False
        return bool(self._active() or self._admissible())

    def _admit(self) -> None:
        """Feed the requests of episodes that have a row, and new ones while rows last."""
        if not self._is_due():
            return
        self._ended = self._lost_steps = 0
        requests, self._back = sorted(self._back), []
        while self._new and self._free:
            request = heapq.heappop(self._new)
            if self._open.get(request.id) is request:
                self._row_of[request.id] = heapq.heappop(self._free)
                requests.append(request)
        rows = [self._row_of[request.id] for request in requests]
        for row, request in zip(rows, requests, strict=True):
            self._turns[row] = request
            stop_set = self._stops.index(request.sampling.stop)
            self._table.begin(row, request.token_ids, request.sampling, stop_set)
        self._advance(np.array(rows, dtype=np.int64))

    def _advance(self, rows: Rows) -> None:
        """Feed each row its new tokens and draw one more for it."""
        if not len(rows):
            return
        with torch.no_grad():
            sampled, logprobs = self._forward.sample(self._table, rows)
        if not np.isfinite(logprobs).all():
            raise LogitsNotFinite
        self._table.append(rows, tokens := sampled.astype(np.int64), logprobs.astype(np.float32))
        for row in rows.tolist():
            if (on_tokens := self._turns[row].sampling.on_tokens) is not None:
                on_tokens(self._table.turn_ids(row))
        self._end_turns(rows, tokens)

    def _end_turns(self, rows: Rows, tokens: NDArray[np.int64]) -> None:
        """End the turns whose last token is EOS, completes a stop string, or is the last allowed."""
        table, is_eos = self._table, self._is_eos[tokens]
        is_full = table.known[rows] >= table.limit[rows]
        may_stop = self._stops.candidates[table.stop_set[rows], tokens]
        for index in np.flatnonzero(is_eos | is_full | may_stop):
            row = int(rows[index])
            if may_stop[index] and self._stops.completed(int(table.stop_set[row]), table.turn_ids(row)):
                self._end_turn(row, "stop")
            elif is_eos[index] or is_full[index]:
                self._end_turn(row, "eos" if is_eos[index] else "length")

    def _end_turn(self, row: int, reason: StopReason) -> None:
        request = self._turns.pop(row)
        del self._open[request.id]
        ids, logprobs = self._table.turn_ids(row), self._table.turn_logprobs(row)
        self._table.active[row] = False
        self._ended += 1
        if not request.future.done():
            request.future.set_result(Completion(tuple(ids), tuple(logprobs), reason))

    def _abandon(self, request: _Request) -> None:
        """Drop a turn whose caller was cancelled. Its episode keeps the row until `finish`."""
        row = self._row_of.get(request.id)
        if self._open.get(request.id) is not request:
            if row is not None and request.id not in self._open:  # it ended, and nobody has its ids
                self._table.clear(row)
            return
        del self._open[request.id]
        if request in self._back:
            self._back.remove(request)
        elif row is not None:
            del self._turns[row]
            self._table.clear(row)
            self._ended += 1

    def _fail(self, error: BaseException) -> None:
        """Raise `error` in every waiting caller, and forget every episode."""
        for request in self._open.values():
            if not isinstance(error, Exception):
                request.future.cancel()
            elif not request.future.done():
                request.future.set_exception(error)
        self._lora.restore()
        self._forget()


def make_cuda_deterministic() -> None:
    """Have this process compute the same bits on a GPU every time, as far as PyTorch can.

    Deterministic kernels, no TF32 and no sums in reduced precision; PyTorch warns where an operation has no
    such kernel. Raises UserError if the environment has a cuBLAS workspace that does not allow it.
    """
    workspace = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if workspace not in (":4096:8", ":16:8"):
        raise UserError(
            f"rollout.deterministic cannot hold on a GPU with CUBLAS_WORKSPACE_CONFIG={workspace}; "
            "unset it, or set it to :4096:8"
        )
    torch.use_deterministic_algorithms(True, warn_only=True)
    matmul: Any = torch.backends.cuda.matmul
    matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    matmul.allow_bf16_reduced_precision_reduction = matmul.allow_fp16_reduced_precision_reduction = False


def _by_key(key: Sequence[int | str]) -> tuple[Any, ...]:
    """A sort key for tuples of numbers and strings: numbers come before strings."""
    return tuple((isinstance(part, str), part) for part in key)
