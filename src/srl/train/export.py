"""A run's checkpoint as a model directory that any tool loads, whatever backend trained it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.config import Config, load_saved
from srl.errors import UserError
from srl.files import FORMAT, atomic_directory, link_or_copy, read_json, write_json
from srl.manifests import ABOUT, MANIFEST, check_checkpoint, files_in, replaceable, write_manifest
from srl.model import DTYPES, load_model
from srl.protocol import STOP_STRINGS
from srl.renamed import current_fields
from srl.train.cold_start import about
from srl.train.export_tokenizer import readable_by_all
from srl.train.loading import load_template
from srl.train.prepare import Note
from srl.train.saved import all_checkpoints
from srl.train.search import IndexDigests
from srl.train.shards import merged, shard_files
from srl.train.weights import GENERATION, cast, write_weights

KIND = "model"
RUN = "run.json"
VERL = "verl"
LATEST = "latest_checkpointed_iteration.txt"
"""In which verl says which step it saved last; a directory of a later one is half-written."""
_REPLACEABLE = replaceable(KIND, "an exported model")
_VERL_NAME = re.compile(r"^global_step_(\d+)$")
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
    identity = identity_of(run)
    chosen, checkpoint = _chosen(run, step)
    check_checkpoint(checkpoint, leave_out=f"{_TRAINER}/")
    if out.is_dir() and any(out.iterdir()) and not overwrite:
        raise UserError(f"{out} exists already; choose another --out, or replace it with --overwrite")
    with atomic_directory(out, replace=_REPLACEABLE if overwrite else None) as folder:
        if identity.get("backend") == VERL:
            _of_verl(run, chosen, checkpoint, folder, dtype)
        else:
            _model(checkpoint, folder, dtype, bool(dtype) and load_saved(run).model.trust_remote_code)
        if not readable_by_all(folder):
            note(f"warning: AutoTokenizer reads {out} in another way; use PreTrainedTokenizerFast")
        kept = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("dtype")
        write_manifest(folder, KIND, {"run": run.name, "step": chosen, "files": files_in(folder)})
    return Exported(out, run.name, str(identity.get("backend", "local")), chosen, str(kept))


def identity_of(run: Path) -> dict[str, Any]:
    """What `run.json` says. Raises UserError where `run` is no run."""
    if not (run / RUN).is_file():
        raise UserError(f"{run} is no run: there is no {RUN} in it; `srl inspect runs` lists runs")
    return read_json(run / RUN, lambda **found: current_fields("run", found))


def whole_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints of `run` by step, oldest first; half-written ones are left out."""
    if identity_of(run).get("backend") != VERL:
        return {int(path.name.removeprefix("step-")): path for path in all_checkpoints(run)}
    folder = run / "checkpoints"
    latest = _latest(folder / LATEST)
    found = ((_VERL_NAME.match(path.name), path) for path in folder.glob("global_step_*"))
    steps = {int(match[1]): path for match, path in found if match and int(match[1]) <= latest}
    return {step: steps[step] for step in sorted(steps) if _has_model(steps[step] / "actor")}


def _latest(file: Path) -> int:
    said = file.read_text(encoding="utf-8").strip() if file.is_file() else "-1"
    try:
        return int(said)
    except ValueError as error:
        raise UserError(
            f"{file} does not say which step is whole: expected its number, found {said!r}"
        ) from error


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
    write_json(folder / ABOUT, _about(run, step, checkpoint, config))


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


def _about(run: Path, step: int, checkpoint: Path, config: Config) -> dict[str, Any]:
    """What a local checkpoint says of how its model was trained to talk, and with which index."""
    file = checkpoint / ABOUT
    if file.is_file():
        return {"format": FORMAT, **read_json(file, dict)}
    searched = IndexDigests.read(identity_of(run))
    return {"format": FORMAT, "step": step, **about(load_template(config)), **searched.as_fields()}
