"""The weights of a model that several processes saved, each its part, put together again.

What is read is what FSDP and FSDP2 write: a file a process, of tensors that know which rows they hold.
The files are read as data only, so that one from a stranger cannot run code; the numbers stay as trained.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from srl.errors import UserError

SIZE = "fsdp_config.json"
ADAPTER = "lora_train_meta.json"
_PEFT = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def shard_files(folder: Path) -> list[Path]:
    """The file of each process in order; none where `folder` is no such checkpoint, or not a whole one."""
    file = folder / SIZE
    if not file.is_file():
        return []
    size = int(json.loads(file.read_text(encoding="utf-8"))["world_size"])
    files = [folder / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
    return files if all(path.is_file() for path in files) else []


def merged(folder: Path) -> dict[str, Tensor]:
    """The state of the plain model in `folder`, any adapter added to its weights. Raises UserError."""
    files = shard_files(folder)
    if not files:
        raise UserError(f"{folder} is not whole: it has no {SIZE}, or not the file of every process")
    with _without_warning():
        shards = [_load(file) for file in files]
    if any(shard.keys() != shards[0].keys() for shard in shards):
        raise UserError(f"{folder}: its files do not belong together, they name different weights")
    state = {name: _whole(name, [shard.pop(name) for shard in shards]) for name in list(shards[0])}
    return _without_adapter(state, folder)


@contextmanager
def _without_warning() -> Iterator[None]:
    """Without the line about process groups that each tensor brings: there are none here, and none needed."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _load(file: Path) -> dict[str, Any]:
    try:
        return dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
    except (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UserError(f"{file} holds no weights that can be read safely: {why}") from error


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """The weight of which process i holds `parts[i]`."""
    first = parts[0]
    if not isinstance(first, DTensor):
        if any(not torch.equal(first, part) for part in parts[1:]):
            raise UserError(f"{name} is not divided and yet differs between the processes")
        return first
    ranks, dimension = division(name, first)
    pieces = [parts[rank].to_local() for rank in ranks]  # type: ignore[attr-defined]
    whole = pieces[0] if dimension is None else torch.cat(pieces, dim=dimension)
    if whole.shape != first.shape:
        raise UserError(f"{name} is {tuple(first.shape)}, and its parts make {tuple(whole.shape)}")
    return whole


def division(name: str, tensor: DTensor) -> tuple[list[int], int | None]:
    """The processes that hold the parts in order, and along which dimension; None: each holds it all.

    Where groups of processes hold copies, it is the first group.
    """
    cut = [axis for axis, placement in enumerate(tensor.placements) if placement.is_shard()]
    kept = [axis for axis, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if len(cut) > 1 or len(cut) + len(kept) < len(tensor.placements):
        raise UserError(f"{name} is divided in a way that is not read: {tensor.placements}")
    mesh = tensor.device_mesh.mesh
    if not cut:
        return [int(mesh.reshape(-1)[0])], None
    placement: Any = tensor.placements[cut[0]]
    group = mesh.movedim(cut[0], -1).reshape(-1, mesh.shape[cut[0]])[0]
    return group.tolist(), placement.dim


def _without_adapter(state: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`state` under the names of the plain model, W + alpha/rank · BA for each weight with an adapter."""
    adapted = sorted(name.removesuffix(_A) for name in state if name.endswith(_A))
    plain = {_plain_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    if adapted and len(plain) + 2 * len(adapted) != len(state):
        raise UserError(f"{folder} has an adapter of a kind that is not read; LoRA on linear layers is")
    scale = _scale(folder / ADAPTER) if adapted else 0.0
    for name in adapted:
        weight = plain.get(target := f"{_plain_name(name)}.weight")
        if weight is None or f"{name}{_B}" not in state:
            raise UserError(
                f"{folder} holds the adapter without the weights it is for; they must be saved too"
            )
        change = state[f"{name}{_B}"].float() @ state[f"{name}{_A}"].float()
        plain[target] = (weight.float() + scale * change).to(weight.dtype)
    return plain


def _plain_name(name: str) -> str:
    return name.removeprefix(_PEFT).replace(".base_layer.", ".")


def _scale(file: Path) -> float:
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        return float(known["lora_alpha"]) / float(known["r"])
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{file} does not say the adapter's rank and alpha: {error}") from error
