"""The model's linear layers as a rollout wants them: LoRA merged in, and computed by the faster library."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from srl.model import StoredWeight, stored_weights

LARGE = 1 << 14
"""The fewest elements of a weight that oneDNN multiplies."""
GAIN = 1.15
"""How many times faster oneDNN must be to take the place of PyTorch's own choice."""


class MergedLora:
    """Merges a model's LoRA adapter into its weights and takes it out again.

    Subtracting the adapter would leave rounding errors in the weights. So the weights as they were are kept,
    in host memory, and put back to the bit. A weight that something else uses too, such as a tied embedding,
    stays apart from its adapter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._kept: list[tuple[StoredWeight, Tensor]] = []

    @torch.no_grad()
    def merge(self) -> None:
        """Have each adapted layer compute with one matrix, W + ΔW summed in float32, if it does not yet."""
        if self._kept:
            return
        weights = stored_weights(self.model)
        users = Counter(id(weight.held) for weight in weights)
        try:
            for weight in weights:
                disabled = any(layer.disable_adapters for layer in weight.layers)
                if weight.adapters and users[id(weight.held)] == 1 and not disabled:
                    self._kept.append((weight, weight.held.to("cpu", copy=True)))
                    weight.held.copy_(weight.merged())
                    for layer, adapter in weight.adapters:
                        layer.merged_adapters.append(adapter)
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back as they were before `merge`."""
        while self._kept:
            weight, base = self._kept[-1]
            weight.held.copy_(base)
            for layer in weight.layers:
                layer.merged_adapters.clear()
            self._kept.pop()


@contextmanager
def onednn_linears(model: nn.Module) -> Iterator[None]:
    """Inside, the large float32 linear layers of `model` are multiplied by oneDNN, without gradients."""
    layers = _large_layers(model)
    for layer in layers:
        layer.__dict__["forward"] = partial(_onednn_linear, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def _large_layers(model: nn.Module) -> list[nn.Linear]:
    linear = [layer for layer in model.modules() if type(layer) is nn.Linear]
    return [one for one in linear if one.weight.numel() >= LARGE and one.weight.dtype == torch.float32]


def _onednn_linear(layer: nn.Linear, states: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, layer.weight, layer.bias, "none", [], "")


@torch.no_grad()
def is_onednn_faster(model: nn.Module, rows: int) -> bool:
    """Whether oneDNN beats PyTorch's own float32 matrix product, by a trial on some layers of the model.

    MKL, PyTorch's choice, has its fastest code for processors of one maker only. False where the two differ.
    """
    layers = _large_layers(model)[:8]
    cpu = all(layer.weight.device.type == "cpu" for layer in layers)
    if not layers or not cpu or not torch.backends.mkldnn.is_available():
        return False
    inputs = [(torch.ones(rows, 1, layer.in_features), layer) for layer in layers]

    def theirs() -> list[Tensor]:
        return [nn.functional.linear(states, layer.weight, layer.bias) for states, layer in inputs]

    def ours() -> list[Tensor]:
        return [_onednn_linear(layer, states) for states, layer in inputs]

    try:
        same = all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(theirs(), ours(), strict=True))
    except (AttributeError, RuntimeError):  # a build of PyTorch without this operator
        return False
    return same and _seconds(theirs) > GAIN * _seconds(ours)


def _seconds(compute: Callable[[], object]) -> float:
    """The least time of several runs, which other programs disturb least."""
    times = []
    for _ in range(7):
        start = time.perf_counter()
        compute()
        times.append(time.perf_counter() - start)
    return min(times)
