"""`srl train export`: a run's checkpoint, of either backend, as a model directory that any tool loads."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srl.config import Config, load_saved
from srl.errors import UserError, parsing
from srl.files import (
    ABOUT,
    MANIFEST,
    atomic_directory,
    check_checkpoint,
    files_in,
    link_or_copy,
    replaceable,
    write_json,
    write_manifest,
)
from srl.model import DTYPES, error_line, load_model, quietly
from srl.protocol import STOP_STRINGS
from srl.train.make_missing import Note
from srl.train.model_card import card_of_run, read_card, write_card
from srl.train.questions import load_template
from srl.train.run_directory import CHECKPOINTS, VERL_LATEST, RunRecord, checkpoints
from srl.train.search import IndexDigests
from srl.train.sharded_weights import merged, shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "model"
GENERATION = "generation_config.json"
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The class that reads `tokenizer.json` unchanged, by its names in transformers 4 and 5."""
_REPLACEABLE = replaceable(KIND, "an exported model")
_TRAINER = "trainer"
_MEGATRON = Path("model", "huggingface")
"""Where verl saves the whole model when it trains with Megatron."""
_PARTS = Path("model", "dist_ckpt")
"""Where verl saves Megatron's own shards, if configured so."""


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported model: its directory, and the checkpoint that it was made from."""

    directory: Path
    run: str
    backend: str
    step: int
    dtype: str


def export(
    run: Path,
    out: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    note: Note = lambda text: None,
) -> Exported:
    """Write the checkpoint of `step` (the newest by default) of `run` to the directory `out`.

    The weights are the actor's, as saved or converted to `dtype`. The directory appears whole or not at all.
    Raises UserError.
    """
    backend = RunRecord.read(run).backend
    chosen, checkpoint = _chosen(run, step)
    check_checkpoint(checkpoint, leave_out=f"{_TRAINER}/")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already; choose another --out, or replace it with --overwrite")
    with atomic_directory(out, replace=_REPLACEABLE if overwrite else None) as folder:
        if backend == "verl":
            _export_verl(run, chosen, checkpoint, folder, dtype)
        else:
            _copy_model(checkpoint, folder, dtype, bool(dtype) and load_saved(run).model.trust_remote_code)
        if not is_tokenizer_read_as_written(folder):
            note(f"warning: AutoTokenizer misreads the tokenizer in {out}; use PreTrainedTokenizerFast")
        kept = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
        write_manifest(folder, KIND, {"run": run.name, "step": chosen, "files": files_in(folder)})
    return Exported(out, run.name, backend, chosen, str(kept))


def whole_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints of `run` by step, oldest first; half-written ones are left out."""
    if RunRecord.read(run).backend == "local":
        return checkpoints(run)
    latest = _latest(run / CHECKPOINTS / VERL_LATEST)
    found = checkpoints(run, "verl").items()
    return {step: path for step, path in found if step <= latest and _has_model(path / "actor")}


def _latest(file: Path) -> int:
    said = file.read_text(encoding="utf-8").strip() if file.is_file() else "-1"
    with parsing(file):
        return int(said)


def _has_model(actor: Path) -> bool:
    return bool(shard_files(actor)) or (actor / _MEGATRON).is_dir() or (actor / _PARTS).is_dir()


def _chosen(run: Path, step: int | None) -> tuple[int, Path]:
    found = whole_checkpoints(run)
    if not found:
        raise UserError(
            f"the run {run.name} has no complete checkpoint yet; trainer.save_freq sets when one is saved"
        )
    if step is None:
        return list(found.items())[-1]
    if step not in found:
        raise UserError(f"{run.name} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
    return step, found[step]


def _copy_model(source: Path, folder: Path, dtype: str | None, trust_remote_code: bool) -> None:
    """Copy a model directory without its trainer state; safetensors are hard links where possible."""
    for file in source.iterdir():
        if file.name == MANIFEST:
            continue
        if file.is_file() and not (dtype and ".safetensors" in file.name):
            (link_or_copy if file.suffix == ".safetensors" else shutil.copyfile)(file, folder / file.name)
        elif file.is_dir() and file.name != _TRAINER:
            link_or_copy(file, folder / file.name)
    if dtype:
        model = load_model(source, dtype="float32", device="cpu", trust_remote_code=trust_remote_code)
        state = cast(model.state_dict(), DTYPES[dtype])
        write_weights(folder, state, source, trust_remote_code=trust_remote_code)


def _export_verl(run: Path, step: int, checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """Merge the actor of verl's checkpoint, and add what a checkpoint of the local backend has beside it."""
    config = load_saved(run)
    actor = checkpoint / "actor"
    trust = config.model.trust_remote_code
    if shard_files(actor):
        state = merged(actor)
        state = cast(state, DTYPES[dtype]) if dtype else state
        write_weights(folder, state, actor / "huggingface", trust_remote_code=trust)
    else:
        _export_megatron(actor, folder, dtype, config)
    _copy_tokenizer(run, folder)
    write_card(folder / ABOUT, _card(run, step, checkpoint, config))


def _export_megatron(actor: Path, folder: Path, dtype: str | None, config: Config) -> None:
    if config.model.lora_rank:
        raise UserError(
            "adapters trained with Megatron cannot be merged; train with cluster.strategy=fsdp2 to export an "
            "adapter"
        )
    if not any((actor / _MEGATRON).glob("*.safetensors")):
        raise UserError(
            f"{actor} contains shards of Megatron; with megatron-core installed type "
            f"`python -m verl.model_merger merge --backend megatron --local_dir {actor} --target_dir DIR`"
        )
    _copy_model(actor / _MEGATRON, folder, dtype, config.model.trust_remote_code)
    file = folder / GENERATION
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    write_json(file, {**known, "stop_strings": list(STOP_STRINGS)})


def _copy_tokenizer(run: Path, folder: Path) -> None:
    """Copy the tokenizer that the run was trained with over any other."""
    files = [file for file in (run / "tokenizer").glob("*") if file.is_file()]
    if not files:
        raise UserError(f"{run / 'tokenizer'} is empty or missing; expected the run's tokenizer in it")
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _card(run: Path, step: int, checkpoint: Path, config: Config) -> dict[str, Any]:
    """The checkpoint's `srl.json`; made from the run's record for older checkpoints, which have none."""
    if known := read_card(checkpoint):
        return known
    record = RunRecord.read(run)
    digests = IndexDigests(record.index_digest, record.retriever_digests)
    return {"step": step, **card_of_run(config, load_template(config), digests)}


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`state` with its floating-point numbers in `dtype`. Raises UserError if one overflows."""
    made = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    for name, tensor in made.items():
        if not torch.isfinite(tensor).all() and torch.isfinite(state[name]).all():
            raise UserError(f"{name} has values too large for {str(dtype)[6:]}; type --dtype bfloat16")
    return made


def write_weights(
    folder: Path,
    state: dict[str, Tensor],
    described: Path,
    *,
    trust_remote_code: bool = False,
) -> None:
    """Write `state` and the configuration in `described` to `folder`, as `from_pretrained` expects it.

    The generation config gets the stop strings, as with `srl.model.save_model`. Raises UserError if the
    weights do not fit the configuration.
    """
    model = _empty(described, next(iter(state.values())).dtype, trust_remote_code)
    state = _untied(model, state)
    _check(model, state)
    with quietly():
        model.save_pretrained(folder, state_dict=state)
    for file in (described / GENERATION, *described.glob("*.py")):
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    known = json.loads((folder / GENERATION).read_text(encoding="utf-8"))
    write_json(folder / GENERATION, {**known, "stop_strings": list(STOP_STRINGS)})


def _empty(described: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model described by a directory's `config.json`, on the meta device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(
            str(described), trust_remote_code=trust_remote_code, local_files_only=True
        )
        with torch.device("meta"):
            made: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=trust_remote_code
            )
    except Exception as error:
        why = error_line(error)
        raise UserError(f"{described} does not describe a causal language model: {why}") from error
    return made


def _untied(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with each tied weight once, under the name that it is stored under."""
    tied = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            tied[id(parameter)].append(name)
    for first, *others in tied.values():
        if any(not torch.equal(state[first], state[other]) for other in others):
            raise UserError(
                f"{first} and {', '.join(others)} are tied by config.json, but their values differ"
            )
    again = {name for _, *others in tied.values() for name in others}
    return {name: tensor for name, tensor in state.items() if name not in again}


def _check(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Raises UserError for a weight that is missing, unknown, or of another shape."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    missing, unknown = (once & shapes.keys()) - state.keys(), state.keys() - shapes.keys()
    misshaped = {name for name in state.keys() & shapes.keys() if state[name].shape != shapes[name]}
    for names, what in ((missing, "missing"), (unknown, "unknown"), (misshaped, "of another shape:")):
        if names:
            raise UserError(
                f"the checkpoint does not fit its config.json: {what} {', '.join(sorted(names)[:3])}"
            )


def is_tokenizer_read_as_written(directory: Path) -> bool:
    """Whether `AutoTokenizer` reads the tokenizer of a model directory as its `tokenizer.json` says.

    For some architectures (Qwen2) transformers 5 builds its own tokenizer from the vocabulary, whatever class
    is named.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if config.get("tokenizer_class") not in GENERIC:
        return True
    return _pipeline(AutoTokenizer, directory) == _pipeline(PreTrainedTokenizerFast, directory)


def _pipeline(kind: Any, directory: Path) -> str:
    """The whole pipeline between text and ids, as one string."""
    with quietly():
        tokenizer = kind.from_pretrained(str(directory), local_files_only=True)
    return str(tokenizer.backend_tokenizer.to_str())
