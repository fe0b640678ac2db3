"""Merges the weights that FSDP and FSDP2 save in shards, one file per process.

Each file holds tensors that know which rows they are. Files are read as data only, so that they cannot run
code, which verl's own merger would let them. Values stay bit for bit as trained.
"""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from srl.errors import UserError, first_line, parsing

_PEFT = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def shard_files(folder: Path) -> list[Path]:
    """The file of each process in order; empty if `folder` is not a complete FSDP checkpoint."""
    file = folder / "fsdp_config.json"
    if not file.is_file():
        return []
    size = int(json.loads(file.read_text(encoding="utf-8"))["world_size"])
    files = [folder / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
    return files if all(path.is_file() for path in files) else []


def merged(folder: Path) -> dict[str, Tensor]:
    """The merged weights of the checkpoint in `folder`, with any LoRA adapter added. Raises UserError."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it says for every tensor that there are no process groups
    try:
        shards = [
            dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
            for file in shard_files(folder)
        ]
        state = {name: _whole(name, [shard.pop(name) for shard in shards]) for name in list(shards[0])}
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder} cannot be read as weights alone: {first_line(error)}") from error
    finally:
        logger.setLevel(before)
    return _without_adapter(state, folder)


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """The whole weight, of which process i saved `parts[i]`."""
    first = parts[0]
    if not isinstance(first, DTensor):
        if any(not torch.equal(first, part) for part in parts[1:]):
            raise UserError(f"{name} is not sharded, but differs between the processes")
        return first
    ranks, dimension = sharding(name, first)
    pieces = [parts[rank].to_local() for rank in ranks]  # type: ignore[attr-defined]
    tensor = pieces[0] if dimension is None else torch.cat(pieces, dim=dimension)
    if tensor.shape != first.shape:
        raise UserError(f"{name} has the shape {tuple(first.shape)}, its shards {tuple(tensor.shape)}")
    return tensor


def sharding(name: str, tensor: DTensor) -> tuple[list[int], int | None]:
    """The processes that hold the shards in order, and the dimension they are cut along.

    The dimension is None where each process holds the whole tensor. Of several groups of processes that hold
    copies, the first is named.
    """
    shards: dict[int, Any] = {
        axis: placement for axis, placement in enumerate(tensor.placements) if placement.is_shard()
    }
    copies = [placement for placement in tensor.placements if placement.is_replicate()]
    if len(shards) > 1 or len(shards) + len(copies) < len(tensor.placements):
        raise UserError(f"{name} is sharded in a way that is not supported: {tensor.placements}")
    first_copy = tuple(slice(None) if axis in shards else 0 for axis in range(len(tensor.placements)))
    ranks = tensor.device_mesh.mesh[first_copy].reshape(-1).tolist()
    return ranks, next((placement.dim for placement in shards.values()), None)


def _without_adapter(state: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """`state` under the plain model's names, with W + alpha/rank · BA for each weight W with an adapter."""
    adapted = sorted(name.removesuffix(_A) for name in state if name.endswith(_A))
    plain = {_plain_name(name): tensor for name, tensor in state.items() if ".lora_" not in name}
    if len(plain) + 2 * len(adapted) != len(state):
        raise UserError(f"{folder} has an adapter of an unsupported kind; LoRA on linear layers is supported")
    file = folder / "lora_train_meta.json"
    with parsing(f"{file}, the adapter's rank and alpha"):
        adapter = json.loads(file.read_text(encoding="utf-8")) if adapted else {"lora_alpha": 1, "r": 1}
        scale = float(adapter["lora_alpha"]) / float(adapter["r"])
    for name in adapted:
        weight = plain.get(target := f"{_plain_name(name)}.weight")
        if weight is None or f"{name}{_B}" not in state:
            raise UserError(f"{folder} contains an adapter without the weights that it was trained on")
        change = state[f"{name}{_B}"].float() @ state[f"{name}{_A}"].float()
        plain[target] = (weight.float() + scale * change).to(weight.dtype)
    return plain


def _plain_name(name: str) -> str:
    return name.removeprefix(_PEFT).replace(".base_layer.", ".")
