"""What a model says of a few random rows, each alone: what every faster way to run it must say too."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from srl.errors import UserError, error_line
from srl.models.weights import Float32Head, plain_model, stored_weights, without_wrappers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Result = TypeVar("_Result")

ENDS = 8
"""Positions at the end of each row whose outputs are compared."""
WINDOW = re.compile("(window|window_size|chunk_size|block_size|local_attention|index_topk|floor_scale)$")
"""The end of the name of each number of a configuration that may be a window, or a length from which a model
computes otherwise."""
SHORTEST = 20
"""Ids of the long rows of a model without windows."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
"""The largest difference of outputs that counts as rounding, in units of their standard deviation."""
MERGED = 0.2
"""The same where a merged adapter is rounded to fewer bits than 32."""


class OutputsNotFinite(UserError):  # noqa: N818 - what is wrong, as in LogitsNotFinite
    """What a model says of random tokens is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Rows of random ids, and the outputs at their ends; two of the rows begin alike.

    `ends` (rows, K, D) float32 are the logits of a causal model, the states of a trunk, at the last K ids of
    each row, computed from that row alone in one forward pass.
    """

    rows: list[list[int]]
    ends: Tensor
    limit: float

    def wrong(self, outputs: Tensor, expected: Tensor | None = None) -> str | None:
        """How far `outputs` are from `expected`, by default the ends, in words; None for mere rounding."""
        apart = outputs.to(self.ends) - (self.ends if expected is None else expected)
        ratio = apart.square().mean().sqrt() / self.ends.std().clamp_min(1e-12)
        share = float(ratio.nan_to_num(nan=float("inf")))
        return None if share <= self.limit else f"by {share:.2g} of their spread"


@torch.no_grad()
def probe(model: nn.Module, longest: int) -> Probe:
    """Three rows through `model`, a causal model or its trunk, longer than its windows below `longest` ids.

    Raises UserError where the model raises, its outputs are not finite, or later ids change earlier outputs.
    """
    random, vocabulary = torch.Generator().manual_seed(0), text_config(model).vocab_size
    ids = torch.randint(vocabulary, (3, probe_length(model, longest)), generator=random)
    first, second, third = ids.tolist()
    half = len(first) // 2
    count, own = min(ENDS, half), min(ENDS, half) // 2
    rows = [first, [*first[:half], *second[:own]], third[: max(count, half + own - 1)]]
    shared = list(range(half - count + own, half))  # places before which two rows are alike
    last = [list(range(len(row) - count, len(row))) for row in rows]
    pairs = list(zip(rows, [shared + last[0], *last[1:]], strict=True))
    whole, *row_ends = attempt(model, lambda: [_outputs(model, *each) for each in pairs])
    ends, name = torch.stack([whole[len(shared) :], *row_ends]), type(model).__name__
    if not bool(ends.isfinite().all()):
        raise OutputsNotFinite(f"{name}: its outputs for random tokens are not finite (NaN or infinite)")
    result = Probe(rows, ends, TOLERANCE.get(next(model.parameters()).dtype, TOLERANCE[torch.bfloat16]))
    if why := result.wrong(ends[1, : len(shared)], whole[: len(shared)]):
        raise UserError(
            f"{name}: outputs for the same tokens change with later tokens or from pass to pass, {why}: what "
            "is trained would not be what was sampled"
        )
    return result


@torch.no_grad()
def ends_of(model: nn.Module, expected: Probe) -> Tensor:
    """The ends of the rows of `expected`, (rows, K, D), computed anew by `model` as it is now."""
    count = expected.ends.shape[1]
    return torch.stack([_outputs(model, row, list(range(len(row)))[-count:]) for row in expected.rows])


def check_same(model: PreTrainedModel, plain: PreTrainedModel, fault: str) -> None:
    """Raises UserError with `fault` where `plain`, with the weights of `model`, computes something else."""
    if isinstance(model.get_output_embeddings(), Float32Head):
        plain.get_output_embeddings().__class__ = Float32Head
    expected = probe(model, SHORTEST)
    if model.dtype.itemsize < 4:
        expected = replace(expected, limit=MERGED)
    if why := expected.wrong(ends_of(plain, expected)):
        raise UserError(f"{type(model).__name__}: {fault}: its logits differ {why}")


@torch.no_grad()
def check_merging(model: PreTrainedModel) -> None:
    """Raises UserError where a plain model with the merged weights of `model`, in host memory, computes
    something else.

    Meanwhile the adapters are random, so that each adds half the size of its weight; they are put back to
    the bit.
    """
    fault = "its adapter cannot be merged into its weights (model.lora_target_modules chooses others)"
    kept = [(weight, weight.detach().clone()) for weight in model.parameters() if weight.requires_grad]
    generator, weights = torch.Generator().manual_seed(0), stored_weights(model)
    try:
        for weight in weights:
            for layer, adapter in weight.adapters:
                wanted = 0.5 * float(weight.held.float().std())  # of scaling · BA, whose terms are r products
                size = (wanted / (layer.scaling[adapter] * layer.r[adapter] ** 0.5)) ** 0.5
                for name in layer.adapter_layer_names:
                    for factor in getattr(layer, name).parameters():
                        factor.copy_(size * torch.randn(factor.shape, generator=generator))
        plain = plain_model(model)
        plain.load_state_dict({weight.name: weight.merged().cpu() for weight in weights}, assign=True)
        for _, name, module, _ in without_wrappers(model):
            for attribute, buffer in module.named_buffers(recurse=False):
                setattr(plain.get_submodule(name.removesuffix(".")), attribute, buffer.cpu())
        check_same(model, plain, fault)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{type(model).__name__}: {fault}: {error_line(error)}") from error
    finally:
        for trained, before in kept:
            trained.data.copy_(before)


def attempt(model: nn.Module, run: Callable[[], _Result]) -> _Result:
    """What `run` returns. Raises UserError for what the model's own code raises in it."""
    try:
        return run()
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error_line(error)}"
        raise UserError(f"{type(model).__name__} raises in a forward pass: {what}") from error


def text_config(model: nn.Module) -> Any:
    """The configuration of the language model, or of the language part of it."""
    config: Any = model.config
    return config.get_text_config()


def probe_length(model: nn.Module, longest: int) -> int:
    """Ids of the long row: beyond twice every window that `longest` ids pass, and within the others."""
    config = text_config(model)
    sizes = [value for name, value in vars(config).items() if WINDOW.search(name)]
    windows = [value for value in sizes if type(value) is int and value > 0]
    length = SHORTEST + 2 * max((window for window in windows if window < longest), default=0)
    return min([length, *(window for window in windows if window >= longest), context_of(config) or length])


def context_of(config: Any) -> int | None:
    """The longest sequence of a model with this configuration, in tokens; None if it does not say.

    A model with `longrope` has other rotary frequencies for texts that are longer than those it was first
    trained on, for all rows of a batch at once. Rows would depend on what shares their batch, so its context
    ends there.
    """
    text = config.get_text_config()
    lengths = [getattr(text, name, None) for name in ("max_position_embeddings", "max_seq_len")]
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):
        first = "original_max_position_embeddings"
        lengths += [getattr(text, first, None), rope.get(first)]
    return min((length for length in lengths if length), default=None)


def kept_logits(model: nn.Module, places: int | Tensor) -> dict[str, Any]:
    """The keyword that limits the logits to the last so many positions, or to these, where there is one."""
    base: Any = getattr(model, "get_base_model", lambda: model)()
    can_limit = "logits_to_keep" in inspect.signature(base.forward).parameters
    return {"logits_to_keep": places} if can_limit else {}


def _outputs(model: nn.Module, row: list[int], places: list[int]) -> Tensor:
    """Logits or states (len(places), D) of one row."""
    device = next(model.parameters()).device
    index = torch.tensor(places, device=device)
    keep = kept_logits(model, index)
    out: Any = model(input_ids=torch.tensor([row], device=device), use_cache=False, **keep)
    values: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return (values[0] if keep else values[0, index]).float()
