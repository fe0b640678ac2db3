"""Whether an engine generates with the trainer's weights: after each sync a sample of both is compared.

The sample is a few columns of every matrix of a numbered layer: attention and feed-forward of all layers, and
their adapters where these stay apart. A column can be had from a layer that is fused with others, or packed
for a processor: it is what the layer makes of a unit vector.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from srl.errors import CheckFailed

COLUMNS = 4
_LAYER = re.compile(r"\.\d+\.")

Sample = Mapping[str, tuple[Sequence[int], Sequence[str]]]
"""By name the shape of a weight of the trainer, and the digests of its columns in the dtypes of engines."""


class NotDelivered(CheckFailed):
    """The engine does not hold the weights that the trainer sent."""


def column_numbers(width: int) -> list[int]:
    """The columns of a matrix (rows, width) that belong to the sample."""
    return [width * number // COLUMNS for number in range(COLUMNS)]


def sampled(
    weights: Iterable[tuple[str, Tensor]], sample: dict[str, Any], scaling: float = 1.0
) -> Iterator[tuple[str, Tensor]]:
    """The trainer's `weights` as they are; meanwhile `sample` is filled, a `Sample`.

    `scaling` is that of an adapter, with which engines multiply its second matrix.
    """
    for name, tensor in weights:
        if tensor.ndim == 2 and _LAYER.search(name):
            columns = tensor.detach()[:, column_numbers(tensor.shape[1])]
            factor = scaling if ".lora_B." in name else 1.0
            dtypes = (torch.float32, torch.bfloat16, torch.float16)
            sample[name] = tuple(tensor.shape), [_digest(columns.to(dtype) * factor) for dtype in dtypes]
        yield name, tensor


def held_digests(columns: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The digests of the columns that an engine holds, by name, without those that are not finite."""
    return {name: _digest(column) for name, column in columns if bool(column.isfinite().all())}


def _digest(columns: Tensor) -> str:
    exact = (columns.float() + 0.0).cpu().contiguous()  # -0.0 becomes 0.0, as in a product
    return blake2b(exact.numpy().tobytes(), digest_size=8).hexdigest()


@cache
def _warn_once() -> None:
    logging.getLogger(__name__).warning(
        "the engine has none of the trainer's layers under their names, so what it holds cannot be compared"
    )


def check_held(sample: Sample, digests: Mapping[str, str] | None) -> None:
    """Raises NotDelivered with the first weight of which the engine holds another, and for an empty sample.
    `digests` is what `Engine.digests` says; where it has none of the sample, a warning says so once."""
    if digests is not None and not sample:
        raise NotDelivered("the engine that samples has not taken the trainer's weights")
    if digests is not None and not digests:
        _warn_once()
    if stale := [name for name, digest in (digests or {}).items() if digest not in sample[name][1]]:
        more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
        raise NotDelivered(
            f"the engine that samples does not hold the trainer's weights: {stale[0]}{more} differ"
        )
