"""`srl train export`: a run's checkpoint, of either backend, as a model directory that any tool loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srl.config import load_saved
from srl.errors import UserError, error_line
from srl.files import (
    ABOUT,
    MANIFEST,
    atomic_directory,
    check_checkpoint,
    files_in,
    link_or_copy,
    replaceable,
    write_manifest,
)
from srl.models.load import DTYPES, load_model, load_tokenizer
from srl.models.weights import save_model
from srl.train.protocol import read_card, stop_strings
from srl.train.run_directory import RunRecord, checkpoints
from srl.train.sharded_weights import merged, shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "model"
_REPLACEABLE = replaceable(KIND, "an exported model")
_TRAINER = "trainer"
_MEGATRON = Path("model", "huggingface")
"""Where verl saves the whole model when it trains with Megatron."""


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
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the checkpoint of `step` (the newest by default) of `run` to the directory `out`.

    The weights are the actor's, as saved or converted to `dtype`. The directory appears whole or not at all.
    Raises UserError.
    """
    backend, trust = RunRecord.read(run).backend, load_saved(run).model.trust_remote_code
    step, checkpoint = _chosen(run, step, backend)
    check_checkpoint(checkpoint, leave_out=f"{_TRAINER}/")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already", hint="--overwrite, or another --out")
    with atomic_directory(out, replace=_REPLACEABLE if overwrite else None) as folder:
        if backend == "local" and dtype is None:
            _copy(checkpoint, folder)
        else:
            source, tokenizer = checkpoint, checkpoint
            if backend == "verl":
                actor, tokenizer = checkpoint / "actor", run / "tokenizer"
                source = actor / ("huggingface" if shard_files(actor) else _MEGATRON)
            if backend == "verl" and shard_files(actor):
                model = with_weights(source, merged(actor), trust_remote_code=trust)
            elif backend == "verl" and load_saved(run).model.lora_rank:
                what = "adapters trained with Megatron cannot be merged"
                raise UserError(what, key="cluster.strategy", hint="train with cluster.strategy=fsdp2")
            else:
                saved = _dtype_of(source) if dtype is None else "float32"
                model = load_model(source, dtype=saved, device="cpu", trust_remote_code=trust)
            model = model if dtype is None else in_dtype(model, DTYPES[dtype])
            stops = stop_strings(read_card(checkpoint))
            save_model(model, load_tokenizer(tokenizer)[0], folder / "model", stop_strings=stops)
            for file in (folder / "model").iterdir():
                file.rename(folder / file.name)
            (folder / "model").rmdir()
            for file in source.glob("*.py"):
                shutil.copyfile(file, folder / file.name)
            _copy(tokenizer, folder, leave_out=("config.json", "generation_config.json"), weights=False)
            shutil.copyfile(checkpoint / ABOUT, folder / ABOUT)
        kept = _dtype_of(folder)
        write_manifest(folder, KIND, {"run": run.name, "step": step, "files": files_in(folder)})
    return Exported(out, run.name, backend, step, kept, str(read_card(out).get("vllm", "")))


def _chosen(run: Path, step: int | None, backend: str) -> tuple[int, Path]:
    """The checkpoint of a step, or the newest; half-written ones of verl are none. Raises UserError."""
    found = checkpoints(run, "verl" if backend == "verl" else "local")
    if not found:
        raise UserError(f"the run {run.name} has no complete checkpoint yet", hint="trainer.save_freq")
    if step is None:
        return list(found.items())[-1]
    if step not in found:
        raise UserError(f"{run.name} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
    return step, found[step]


def _dtype_of(model: Path) -> str:
    return str(json.loads((model / "config.json").read_text(encoding="utf-8")).get("dtype"))


def _copy(source: Path, folder: Path, leave_out: Sequence[str] = (), weights: bool = True) -> None:
    """Copy a model's files, without its trainer state; safetensors are hard links where possible."""
    for file in source.iterdir():
        if file.name in (MANIFEST, _TRAINER, *leave_out) or (not weights and ".safetensors" in file.name):
            continue
        if file.is_dir() or file.suffix == ".safetensors":
            link_or_copy(file, folder / file.name)
        else:
            shutil.copyfile(file, folder / file.name)


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """`model` in `dtype`. Raises UserError if a number overflows."""
    model.to(dtype=dtype)  # type: ignore[call-arg]
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise UserError(f"{name} has values too large for {str(dtype)[6:]}", key="dtype", hint="bfloat16")
    return model


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
