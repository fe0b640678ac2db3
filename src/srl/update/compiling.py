"""Fused kernels for packed batches: `torch.compile` for a model's layers, after a trial of its gain.

The layers of a model are alike, so all share one compiled graph, for any number of tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from srl.model import error_line
from srl.update.batch import Batch
from srl.update.packing import ATTENTION, packed_attention, packed_states

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GAIN = 1.1
"""Compiled layers are used where they are faster by this factor."""
ROWS, LENGTH = 4, 256
"""The batch of the trial: rows × tokens."""

Note = Callable[[str], None]
Step = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Trial:
    """Seconds that forward and backward of one layer take, and that compiling it took."""

    eager: float
    compiled: float
    compiling: float

    @property
    def pays(self) -> bool:
        return self.compiled * GAIN < self.eager

    def __str__(self) -> str:
        return (
            f"a layer takes {1e3 * self.compiled:.0f} ms compiled and {1e3 * self.eager:.0f} ms eager for "
            f"{ROWS * LENGTH:,} tokens, and took {self.compiling:.0f} s to compile"
        )


class CompiledLayer:
    """Calls the compiled layer for packed batches, and the eager one for all others, such as a rollout's.

    If the compiler fails, `failed` is called and the layer stays eager. The backward pass is compiled with
    the forward one, so that a failure there is found before anything depends on it.
    """

    def __init__(self, layer: nn.Module, failed: Note) -> None:
        functorch_config.force_non_lazy_backward_lowering = True
        self._plain = layer._call_impl
        self._compiled: Callable[..., Any] | None = torch.compile(layer.forward, dynamic=True)
        self._failed = failed

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


def compile_layers(trunk: PreTrainedModel, note: Note) -> None:
    """Use compiled layers for packed batches; if the compiler fails, `note` is told once."""
    told: list[str] = []

    def failed(why: str) -> None:
        if not told:
            note(f"torch.compile failed, and updates go on without it: {why}")
        told.append(why)

    _leave_attention_alone()
    for layer in layers_of(trunk):
        layer._compiled_call_impl = CompiledLayer(layer, failed)


def _leave_attention_alone() -> None:
    """Keep our attention out of compiled graphs: its kernels are fused, and it loops over the rows."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))


def layers_of(trunk: PreTrainedModel) -> Sequence[nn.Module]:
    """The layers that the model repeats."""
    names = set(getattr(trunk, "_no_split_modules", None) or ())
    return [module for module in trunk.modules() if type(module).__name__ in names]


def seconds_of_a_layer(trunk: PreTrainedModel) -> float:
    """Seconds of the eager forward and backward pass of one layer, for ROWS × LENGTH tokens."""
    return _seconds(_layer_step(trunk), trunk.device)


def try_compiling(trunk: PreTrainedModel) -> Trial:
    """Compile one layer and time it. Raises whatever the compiler raises."""
    step = _layer_step(trunk)
    eager = _seconds(step, trunk.device)
    _leave_attention_alone()
    layer, failures = layers_of(trunk)[0], list[str]()
    layer._compiled_call_impl = CompiledLayer(layer, failures.append)
    try:
        start = time.perf_counter()
        step()
        if failures:
            raise RuntimeError(failures[0])
        return Trial(eager, compiling=time.perf_counter() - start, compiled=_seconds(step, trunk.device))
    finally:
        layer._compiled_call_impl = None


def _layer_step(trunk: PreTrainedModel) -> Step:
    """Forward and backward pass of the first layer, with the inputs that it has in a packed batch."""
    layer = layers_of(trunk)[0]
    args, options = _layer_inputs(trunk, layer)
    states = args[0].requires_grad_()
    weights = [weight for weight in layer.parameters() if weight.requires_grad]

    def step() -> None:
        out = layer(states, *args[1:], **options)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        torch.autograd.grad(first.sum(), [states, *weights], allow_unused=True)

    return step


@torch.no_grad()
def _layer_inputs(trunk: PreTrainedModel, layer: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of `layer` in a forward pass of the trunk over ROWS × LENGTH ids."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    vocabulary, device = trunk.config.get_text_config().vocab_size, next(trunk.parameters()).device
    ids = torch.arange(ROWS * LENGTH, device=device).reshape(ROWS, LENGTH) % vocabulary
    ones = torch.ones_like(ids)
    hook = layer.register_forward_pre_hook(lambda _, *given: found.append(given), with_kwargs=True)
    try:
        packed_states(trunk, Batch(ids, ones, ones.float(), ones.float(), ones.float()))
    finally:
        hook.remove()
    args, options = found[0]
    if not args:
        args = (options.pop("hidden_states"),)
    return tuple(arg.clone() if isinstance(arg, Tensor) else arg for arg in args), options


def _seconds(step: Step, device: torch.device, times: int = 3) -> float:
    """Median seconds of `step` on `device`, after one that does not count."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return median(taken[1:])
