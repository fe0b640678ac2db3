"""The model's linear layers as a rollout wants them: LoRA merged in, and computed by the faster library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from srl.models.weights import StoredWeight, stored_weights

LARGE = 1 << 14
"""The fewest elements of a weight that oneDNN multiplies."""
CPU_INFO = Path("/proc/cpuinfo")


class MergedLora:
    """Merges a model's LoRA adapter into its weights and takes it out again.

    Subtracting the adapter would leave rounding errors in the weights. So the weights as they were are kept,
    in host memory, and put back to the bit. Of a model on a GPU the copy is pinned and stays: frozen weights
    do not change. A weight that something else uses too, such as a tied embedding, stays apart from its
    adapter.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._merged: list[StoredWeight] = []
        self._base: dict[int, Tensor] = {}  # by the id of the weight

    @torch.no_grad()
    def merge(self) -> None:
        """Have each adapted layer compute with one matrix, W + ΔW summed in float32, if it does not yet."""
        if self._merged:
            return
        weights = stored_weights(self.model)
        users = Counter(id(weight.held) for weight in weights)
        try:
            for weight in weights:
                disabled = any(layer.disable_adapters for layer in weight.layers)
                if weight.adapters and users[id(weight.held)] == 1 and not disabled:
                    if id(weight.held) not in self._base:
                        self._base[id(weight.held)] = _host_copy(weight.held)
                    self._merged.append(weight)
                    weight.held.copy_(weight.merged())
                    for layer, adapter in weight.adapters:
                        layer.merged_adapters.append(adapter)
        except BaseException:
            self.restore()
            raise

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back as they were before `merge`."""
        while self._merged:
            weight = self._merged[-1]
            weight.held.copy_(self._base[id(weight.held)], non_blocking=True)
            for layer in weight.layers:
                layer.merged_adapters.clear()
            if not weight.held.is_cuda:
                del self._base[id(weight.held)]
            self._merged.pop()


def _host_copy(weight: Tensor) -> Tensor:
    copy = torch.empty_like(weight, device="cpu", pin_memory=weight.is_cuda)
    return copy.copy_(weight)


def mkl_is_slow() -> bool:
    """True on processors of other makers than Intel: MKL, PyTorch's choice, has its fast code for Intel's."""
    both = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return both and CPU_INFO.is_file() and "GenuineIntel" not in CPU_INFO.read_text()


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
    return [
        layer for layer in linear if layer.weight.numel() >= LARGE and layer.weight.dtype == torch.float32
    ]


def _onednn_linear(layer: nn.Linear, states: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, layer.weight, layer.bias, "none", [], "")
