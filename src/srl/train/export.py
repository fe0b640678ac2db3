"""A run's checkpoint as a model directory that any tool loads, whatever backend trained it."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from srl.config import Config, load_saved
from srl.errors import UserError
from srl.files import atomic_directory, link_or_copy, write_json
from srl.manifests import ABOUT, MANIFEST, check_checkpoint, files_in, replaceable, write_manifest
from srl.model import DTYPES, load_model, one_line, quietly
from srl.protocol import STOP_STRINGS
from srl.train.model_card import model_card, read_card, write_card
from srl.train.prepare import Note
from srl.train.questions import load_template
from srl.train.run_directory import CHECKPOINTS, VERL_LATEST, RunRecord, checkpoints
from srl.train.search import IndexDigests
from srl.train.shards import merged, shard_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "model"
GENERATION = "generation_config.json"
GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that takes a `tokenizer.json` as it is: in transformers 4 and in 5."""
_REPLACEABLE = replaceable(KIND, "an exported model")
_TRAINER = "trainer"
_MEGATRON = Path("model", "huggingface")
"""Where verl puts the whole model when it trains with Megatron."""
_PARTS = Path("model", "dist_ckpt")
"""And Megatron's own parts of it, where it was told to save these instead."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: the directory, and which checkpoint of which run it is."""

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

    The weights are those that were saved, or these in another `dtype`; of a run with a critic the actor's.
    The directory appears whole or not at all. Raises UserError.
    """
    backend = RunRecord.read(run).backend
    chosen, checkpoint = _chosen(run, step)
    check_checkpoint(checkpoint, leave_out=f"{_TRAINER}/")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already; choose another --out, or replace it with --overwrite")
    with atomic_directory(out, replace=_REPLACEABLE if overwrite else None) as folder:
        if backend == "verl":
            _of_verl(run, chosen, checkpoint, folder, dtype)
        else:
            _model(checkpoint, folder, dtype, bool(dtype) and load_saved(run).model.trust_remote_code)
        if not readable_by_all(folder):
            note(f"warning: AutoTokenizer reads {out} in another way; use PreTrainedTokenizerFast")
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
    try:
        return int(said)
    except ValueError as error:
        raise UserError(f"{file}: expected the number of the latest step, found {said!r}") from error


def _has_model(actor: Path) -> bool:
    return bool(shard_files(actor)) or (actor / _MEGATRON).is_dir() or (actor / _PARTS).is_dir()


def _chosen(run: Path, step: int | None) -> tuple[int, Path]:
    found = whole_checkpoints(run)
    if not found:
        raise UserError(
            f"the run {run.name} has no whole checkpoint yet; trainer.save_freq says when one is made"
        )
    if step is None:
        return list(found.items())[-1]
    if step not in found:
        raise UserError(f"{run.name} has no checkpoint of step {step}; it has {', '.join(map(str, found))}")
    return step, found[step]


def _model(source: Path, folder: Path, dtype: str | None, trust_remote_code: bool) -> None:
    """The files of a model directory without trainer state; large ones are links where they can be."""
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


def _of_verl(run: Path, step: int, checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """The actor of a checkpoint that verl made, and beside it what one of the local backend has."""
    config = load_saved(run)
    actor = checkpoint / "actor"
    trust = config.model.trust_remote_code
    if shard_files(actor):
        state = merged(actor)
        state = cast(state, DTYPES[dtype]) if dtype else state
        write_weights(folder, state, actor / "huggingface", trust_remote_code=trust)
    else:
        _of_megatron(actor, folder, dtype, config)
    _tokenizer(run, folder)
    write_card(folder / ABOUT, _card(run, step, checkpoint, config))


def _of_megatron(actor: Path, folder: Path, dtype: str | None, config: Config) -> None:
    if config.model.lora_rank:
        raise UserError(
            "adapters that were trained with Megatron are not merged; cluster.strategy=fsdp2 saves them so "
            "that they are"
        )
    if not any((actor / _MEGATRON).glob("*.safetensors")):
        raise UserError(
            f"{actor} holds Megatron's own parts of the model; where megatron-core is installed type "
            f"`python -m verl.model_merger merge --backend megatron --local_dir {actor} --target_dir DIR`"
        )
    _model(actor / _MEGATRON, folder, dtype, config.model.trust_remote_code)
    file = folder / GENERATION
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    write_json(file, {**known, "stop_strings": list(STOP_STRINGS)})


def _tokenizer(run: Path, folder: Path) -> None:
    """The tokenizer that the run was trained with, in the place of any other."""
    files = [file for file in (run / "tokenizer").glob("*") if file.is_file()]
    if not files:
        raise UserError(f"{run / 'tokenizer'} is empty or missing: the run's tokenizer belongs there")
    for file in files:
        shutil.copyfile(file, folder / file.name)


def _card(run: Path, step: int, checkpoint: Path, config: Config) -> dict[str, Any]:
    """What the model's `srl.json` says; older checkpoints have none of their own."""
    if known := read_card(checkpoint):
        return known
    record = RunRecord.read(run)
    digests = IndexDigests(record.index_digest, record.retriever_digests)
    return {"step": step, **model_card(load_template(config), digests)}


def cast(state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """`state` with its numbers in `dtype`. Raises UserError where one is too large for it."""
    made = {name: t.to(dtype) if t.is_floating_point() else t for name, t in state.items()}
    for name, tensor in made.items():
        if not torch.isfinite(tensor).all() and torch.isfinite(state[name]).all():
            raise UserError(f"{name} holds numbers too large for {str(dtype)[6:]}; type --dtype bfloat16")
    return made


def write_weights(
    folder: Path,
    state: dict[str, Tensor],
    described: Path,
    *,
    trust_remote_code: bool = False,
    stop_strings: Sequence[str] = STOP_STRINGS,
) -> None:
    """Write `state` and the configuration in `described` to `folder`, as `from_pretrained` expects it.

    The stop strings are in the generation config, as with `srl.model.save_model`. Raises UserError where
    the weights are not those of the configuration.
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
    write_json(folder / GENERATION, {**known, "stop_strings": list(stop_strings) or None})


def _empty(described: Path, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    """The model that a directory's config.json is of, without memory for its weights."""
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
        why = one_line(error)
        raise UserError(f"{described} describes no causal language model: {why}") from error
    return made


def _untied(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` with each tied weight once, under the name it is stored by."""
    tied = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            tied[id(parameter)].append(name)
    for first, *others in tied.values():
        if any(not torch.equal(state[first], state[other]) for other in others):
            raise UserError(f"{first} and {', '.join(others)} are tied by config.json, and yet they differ")
    again = {name for _, *others in tied.values() for name in others}
    return {name: tensor for name, tensor in state.items() if name not in again}


def _check(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Raises UserError where a weight is missing, is one too many, or has another shape."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    missing, unknown = (once & shapes.keys()) - state.keys(), state.keys() - shapes.keys()
    odd = {name for name in state.keys() & shapes.keys() if state[name].shape != shapes[name]}
    for names, what in ((missing, "no weights for"), (unknown, "unknown weights"), (odd, "other shapes of")):
        if names:
            raise UserError(
                f"the checkpoint does not fit its config.json: {what} {', '.join(sorted(names)[:3])}"
            )


def readable_by_all(directory: Path) -> bool:
    """Whether `AutoTokenizer` reads the tokenizer of a model directory as its `tokenizer.json` says.

    For some kinds of model (Qwen2) transformers 5 builds the kind's own tokenizer from the vocabulary,
    whatever class is named. A key in `tokenizer_config.json` makes it take the whole file; it is written
    where it is needed. In spite of its name it allows no code: there is none, and nothing else reads it.
    """
    file = directory / "tokenizer_config.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if known.get("tokenizer_class") not in GENERIC or _is_read_as_written(directory):
        return True
    write_json(file, {**known, "tokenizer_class": GENERIC[0], "trust_remote_code": True})
    return _is_read_as_written(directory)


def _is_read_as_written(directory: Path) -> bool:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    return _pipeline(AutoTokenizer, directory) == _pipeline(PreTrainedTokenizerFast, directory)


def _pipeline(kind: Any, directory: Path) -> str:
    """All that turns text into ids and back, as one string."""
    with quietly():
        tokenizer = kind.from_pretrained(str(directory), local_files_only=True)
    return str(tokenizer.backend_tokenizer.to_str())
