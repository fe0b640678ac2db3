"""Fused kernels for packed batches: `torch.compile` for a model's layers.

The layers of a model are alike, so all share one compiled graph, for any number of tokens.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._functorch import config as functorch_config

from srl.model import Recomputed, error_line
from srl.update.packing import ATTENTION, packed_attention, packs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Note = Callable[[str], None]


class CompiledForward:
    """Calls the compiled `forward` of a layer for packed batches, and it for all others, such as a rollout's.

    If the compiler fails, `failed` is called and the layer stays eager. The backward pass is compiled with
    the forward one, so that a failure there is found before anything depends on it.
    """

    def __init__(self, forward: Callable[..., Any], failed: Note) -> None:
        functorch_config.force_non_lazy_backward_lowering = True
        self._plain = forward
        self._compiled: Callable[..., Any] | None = torch.compile(forward, dynamic=True)
        self._failed = failed

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """A copy of the layer is not compiled: the compiler's function belongs to this one."""
        return copy.deepcopy(self._plain, memo)

    def __call__(self, *args: Any, **options: Any) -> Any:
        mask = options.get("attention_mask")
        if self._compiled is None or mask is None or mask.dtype != torch.int32:
            return self._plain(*args, **options)
        try:
            return self._compiled(*args, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            self._compiled = None
            self._failed(error_line(error))
            return self._plain(*args, **options)


def compile_updates(trunks: Sequence[PreTrainedModel], longest: int, cache: Path, note: Note) -> None:
    """Compile the layers of `trunks` for updates of rows of up to `longest` tokens.

    What the compiler made is kept in `cache`.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache.absolute()))
    for trunk in trunks:
        if packs(trunk, longest) and layers_of(trunk):
            compile_layers(trunk, note)
        else:
            note("actor.use_torch_compile has no effect: this model's batches cannot be packed")


def compile_layers(trunk: PreTrainedModel, note: Note) -> None:
    """Use compiled layers for packed batches; if the compiler fails, `note` is told once."""
    told: list[str] = []

    def failed(why: str) -> None:
        if not told:
            note(f"torch.compile failed, and updates go on without it: {why}")
        told.append(why)

    _leave_attention_alone()
    for layer in layers_of(trunk):
        # The compiler goes inside: a recomputed layer would not be compiled.
        place = layer.forward if isinstance(layer.forward, Recomputed) else layer
        place.forward = CompiledForward(place.forward, failed)


def _leave_attention_alone() -> None:
    """Keep our attention out of compiled graphs: its kernels are fused, and it loops over the rows."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))


def layers_of(trunk: PreTrainedModel) -> Sequence[nn.Module]:
    """The layers that the model repeats."""
    names = set(getattr(trunk, "_no_split_modules", None) or ())
    return [module for module in trunk.modules() if type(module).__name__ in names]
