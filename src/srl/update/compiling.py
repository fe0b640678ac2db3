"""Fused kernels for packed batches: `torch.compile` for a model's layers.

The layers of a model are alike, so all share one compiled graph, for any number of tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from srl.models.load import Recomputed
from srl.update.packing import ATTENTION, packed_attention, packs

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompiledForward:
    """Calls the compiled `forward` of a layer for packed batches, and it for all others, such as a
    rollout's."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._plain, self._compiled = forward, torch.compile(forward, dynamic=True)

    def __call__(self, *args: Any, **options: Any) -> Any:
        mask = options.get("attention_mask")
        is_packed = mask is not None and mask.dtype == torch.int32
        return (self._compiled if is_packed else self._plain)(*args, **options)


def compile_updates(
    trunks: Sequence[PreTrainedModel], longest: int, cache: Path, note: Callable[[str], None]
) -> None:
    """Compile the layers of `trunks` for updates of rows of up to `longest` tokens.

    What the compiler made is kept in `cache`. `note` is told of a model whose batches cannot be packed.
    """
    from transformers import AttentionInterface

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute()))
    for trunk in trunks:
        names = set(getattr(trunk, "_no_split_modules", None) or ())
        layers: list[nn.Module] = [layer for layer in trunk.modules() if type(layer).__name__ in names]
        if not (packs(trunk, longest) and layers):
            note("actor.use_torch_compile has no effect: this model's batches cannot be packed")
            continue
        # Our attention stays out of the graph: its kernels are fused, and it loops over the rows.
        AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
        for layer in layers:
            # The compiler goes inside: a recomputed layer would not be compiled.
            place: Any = layer.forward if isinstance(layer.forward, Recomputed) else layer
            place.forward = CompiledForward(place.forward)
