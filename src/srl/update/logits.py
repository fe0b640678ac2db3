"""How to get a model's logits: from its head and its trunk's states, or only from the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from srl.models.check import attempt
from srl.models.weights import Float32Head
from srl.update import packing
from srl.update.batch import Batch, micro_batches, row_batch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Head = Callable[[Tensor], Tensor]
"""Turns states (N, S) into logits (N, V)."""

LogitsOf = Callable[["PreTrainedModel", Batch, Tensor], tuple[Tensor, Head]]
"""(model, batch, wanted) -> the states that predict the wanted tokens, and the head for them.

`wanted` (B, T - 1) is True at column t if the log-prob of token t + 1 is needed.
"""

_ways: WeakKeyDictionary[PreTrainedModel, LogitsOf] = WeakKeyDictionary()


def logits_of(model: PreTrainedModel) -> LogitsOf:
    """How to get logits from `model`; tested once with a small forward pass."""
    if model not in _ways:
        _ways[model] = head_on_trunk if is_head_on_trunk(model) else whole_model
    return _ways[model]


def head_on_trunk(model: PreTrainedModel, batch: Batch, positions: Tensor) -> tuple[Tensor, Head]:
    """The trunk's states; the caller can turn any number of them into logits at a time."""
    return states_before(model, batch, positions), model.get_output_embeddings()


def whole_model(model: PreTrainedModel, batch: Batch, positions: Tensor) -> tuple[Tensor, Head]:
    """The model's own logits at every position: correct for any model, at the cost of memory."""
    logits = _run(model, batch).logits
    return logits[:, :-1][positions], nn.Identity()


@torch.no_grad()
def is_head_on_trunk(model: PreTrainedModel) -> bool:
    """Whether the model's logits are its head's unchanged output on its trunk's unchanged output.

    Some models scale their logits (Cohere, Granite) or cap them (Gemma 2). The test makes the head give
    numbers up to ±100, since a cap hardly changes small logits.
    """
    head, calls = model.get_output_embeddings(), list[tuple[Tensor, Tensor]]()
    if head is None:
        return False

    def swap(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        marks = torch.linspace(-100, 100, output.numel(), device=output.device).to(output.dtype)
        calls.append((inputs[0], marks.reshape(output.shape)))
        return calls[-1][1]

    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    batch = row_batch([[id % vocabulary for id in row] for row in ((3, 4, 5, 6), (7, 8, 9, 10))], device)
    hook = head.register_forward_hook(swap)
    try:
        logits, _ = whole_model(model, batch, batch.attention_mask[:, 1:] != 0)
        states = last_hidden_state(model, batch)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # whatever a trunk raises that is not called as most are
        return False
    finally:
        hook.remove()
    if len(calls) != 1 or calls[0][0].shape != states.shape:
        return False
    head_inputs, marks = (tensor.float() for tensor in calls[0])
    same_states = torch.allclose(head_inputs, states.float(), rtol=1e-2, atol=1e-2 * float(head_inputs.std()))
    return same_states and torch.equal(logits.float(), marks[:, :-1].flatten(0, 1))


def try_packing(model: PreTrainedModel, longest: int) -> bool:
    """Have `logits_of` pack rows of at most `longest` tokens where that is right; whether it does."""
    return logits_of(model) is head_on_trunk and packing.try_packing(trunk(model), longest)


def micro_batches_of(model: PreTrainedModel, batch: Batch, max_tokens: int) -> Iterator[Tensor]:
    """Row indices in groups of at most `max_tokens` tokens of a forward pass of `logits_of`."""
    if logits_of(model) is head_on_trunk:
        return packing.packed_micro_batches(trunk(model), batch, max_tokens)
    return micro_batches(batch.lengths, max_tokens)


def states_before(model: nn.Module, batch: Batch, positions: Tensor) -> Tensor:
    """The trunk's states (N, D) at the N `positions` (B, T - 1), which predict the tokens after.

    Under a head in float32, which is there to bring trainer and sampler together, attention is exact.
    """
    if not packing.try_packing(trunk(model), batch.input_ids.shape[1]):
        return last_hidden_state(model, batch)[:, :-1][positions]
    packed_positions = nn.functional.pad(positions, (0, 1))[batch.attention_mask != 0]  # (all real tokens,)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return packing.packed_states(trunk(model), batch, exact=isinstance(head, Float32Head))[packed_positions]


def last_hidden_state(model: nn.Module, batch: Batch) -> Tensor:
    """The trunk's output `(B, T, D)`, before the language-model head."""
    states: Tensor = _run(trunk(model), batch).last_hidden_state
    return states


def _run(model: PreTrainedModel, batch: Batch) -> Any:
    """What `model` returns for the padded rows of `batch`."""
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "use_cache": False}
    return attempt(model, lambda: model(**inputs))


def trunk(model: nn.Module) -> PreTrainedModel:
    """The decoder under the head, through a LoRA wrapper where there is one."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    decoder: Any = inner.get_decoder() if hasattr(inner, "get_decoder") else None
    # ModernBERT's decoder calls its head so.
    module: PreTrainedModel = decoder if hasattr(decoder, "config") else inner.base_model
    return module
