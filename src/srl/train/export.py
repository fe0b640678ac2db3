"""`srl train export`: a run's checkpoint, of either backend, as a model directory that any tool loads."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from srl.config import load_saved
from srl.errors import UserError, error_line, first_line, parsing
from srl.files import ABOUT, atomic_directory, check_checkpoint, files_in, replaceable, write_manifest
from srl.models.load import DTYPES, load_model, load_tokenizer
from srl.models.weights import save_model
from srl.train.load_protocol import read_card, stop_strings
from srl.train.run_directory import RunRecord, checkpoints

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "model"


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model: its directory, and the checkpoint that it was made from. `vllm` are the options by
    which vLLM serves one that calls tools in its own way."""

    directory: Path
    run: str
    backend: str
    step: int
    dtype: str
    vllm: str = ""


def export(
    run: Path, out: Path, *, step: int | None = None, dtype: str | None = None, overwrite: bool = False
) -> Exported:
    """Write the checkpoint of `step` (the newest by default) of `run` to the directory `out`.

    The weights are the actor's, as saved or rounded to `dtype`. The directory appears whole or not at all.
    Raises UserError.
    """
    backend, section = RunRecord.read(run).backend, load_saved(run).model
    whole = checkpoints(run, backend)  # half-written ones of verl are none
    if not whole:
        raise UserError(f"the run {run.name} has no complete checkpoint yet", hint="trainer.save_freq")
    step = max(whole) if step is None else step
    if step not in whole:
        raise UserError(f"{run.name} has no checkpoint of step {step}; it has {', '.join(map(str, whole))}")
    checkpoint, trust = whole[step], section.trust_remote_code
    check_checkpoint(checkpoint, leave_out="trainer/")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already", hint="--overwrite, or another --out")
    with atomic_directory(
        out, replace=replaceable(KIND, "an exported model") if overwrite else None
    ) as folder:
        if backend == "verl":
            source, tokenizer = checkpoint / "actor" / "huggingface", run / "tokenizer"
            model = with_weights(source, merged(checkpoint / "actor"), trust_remote_code=trust)
            model = model if dtype is None else model.to(dtype=DTYPES[dtype])  # type: ignore[call-arg]
        else:
            source, tokenizer = checkpoint, checkpoint
            saved = json.loads((source / "config.json").read_text(encoding="utf-8"))["dtype"]
            model = load_model(source, dtype=dtype or saved, device="cpu", trust_remote_code=trust)
        card = read_card(checkpoint)
        save_model(model, load_tokenizer(tokenizer)[0], folder, stop_strings=stop_strings(card))
        for file in (checkpoint / ABOUT, *source.glob("*.py"), *tokenizer.glob("tokenizer*.json")):
            shutil.copyfile(file, folder / file.name)
        write_manifest(folder, KIND, {"run": run.name, "step": step, "files": files_in(folder)})
    dtype = str(model.dtype).removeprefix("torch.")
    return Exported(out, run.name, backend, step, dtype, str(card.get("vllm", "")))


def with_weights(
    described: Path, state: Mapping[str, Tensor], *, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model that a directory's `config.json` describes, with the weights `state`.

    Raises UserError if they do not fit the configuration.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    read: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        config, dtype = AutoConfig.from_pretrained(described, **read), next(iter(state.values())).dtype
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
        unknown = model.load_state_dict(state, strict=False, assign=True).unexpected_keys
    except Exception as error:
        raise UserError(
            f"the checkpoint does not fit {described / 'config.json'}: {error_line(error)}"
        ) from error
    model.tie_weights()
    weights = dict(model.named_parameters(remove_duplicate=False))
    wrong = [name for name, weight in weights.items() if weight.is_meta]
    wrong += [name for name in weights.keys() & state.keys() if not torch.equal(weights[name], state[name])]
    if wrong := [*wrong, *unknown]:
        raise UserError(f"the checkpoint does not fit {described / 'config.json'}: {', '.join(wrong[:3])}")
    if (described / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(described, local_files_only=True)
    return model.eval()


# ---- Shards: FSDP and FSDP2 save one file per process, whose tensors know which rows they are. Files are
# read as data only, so that they cannot run code, which verl's own merger would let them.

_PEFT = "base_model.model."
_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


def merged(folder: Path) -> dict[str, Tensor]:
    """The merged weights of the checkpoint in `folder`, with any LoRA adapter added. Raises UserError."""
    logger = logging.getLogger("torch.distributed.device_mesh")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it says for every tensor that there are no process groups
    try:
        size = int(json.loads((folder / "fsdp_config.json").read_text(encoding="utf-8"))["world_size"])
        files = [folder / f"model_world_size_{size}_rank_{rank}.pt" for rank in range(size)]
        shards = [dict(torch.load(file, map_location="cpu", weights_only=True, mmap=True)) for file in files]
        state = {name: _whole(name, [shard.pop(name) for shard in shards]) for name in list(shards[0])}
    except (OSError, ValueError, RuntimeError, EOFError, LookupError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder} cannot be read as weights alone: {first_line(error)}") from error
    finally:
        logger.setLevel(before)
    return _without_adapter(state, folder)


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """The whole weight, of which process i saved `parts[i]`. Of several groups of processes that hold copies,
    the first counts."""
    first = parts[0]
    if not isinstance(first, DTensor):
        if any(not torch.equal(first, part) for part in parts[1:]):
            raise UserError(f"{name} is not sharded, but differs between the processes")
        return first
    placements = dict(enumerate(first.placements))
    shards: dict[int, Any] = {axis: each for axis, each in placements.items() if each.is_shard()}
    if len(shards) > 1 or not all(each.is_shard() or each.is_replicate() for each in placements.values()):
        raise UserError(f"{name} is sharded in a way that is not supported: {first.placements}")
    group = tuple(slice(None) if axis in shards else 0 for axis in placements)
    ranks = first.device_mesh.mesh[group].reshape(-1).tolist()
    pieces = [parts[rank].to_local() for rank in ranks]  # type: ignore[attr-defined,unused-ignore]
    tensor = torch.cat(pieces, dim=next(iter(shards.values())).dim) if shards else pieces[0]
    if tensor.shape != first.shape:
        raise UserError(f"{name} has the shape {tuple(first.shape)}, its shards {tuple(tensor.shape)}")
    return tensor


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
