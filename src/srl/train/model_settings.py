"""The configuration to run a finished model with: that of its own run, unless others are named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.config.load import SAVED, Layer, flatten, read_layers, resolve, typed_settings
from srl.config.unread import unread_lines
from srl.files import ABOUT
from srl.progress import Note
from srl.protocol import TEMPLATES
from srl.train.load_protocol import read_card, with_protocol
from srl.train.make_missing import with_local_models
from srl.train.run_directory import CHECKPOINTS, RECORD, RunRecord


def trained_with(config: Config) -> dict[str, str]:
    """The digests of indexes that the model's card has by retriever; none without a directory."""
    card = {} if config.model.path is None else read_card(Path(config.model.path))
    return dict(card.get("indexes") or {})


def local_settings(
    model: Path | None,
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
    note: Note,
) -> Config:
    """`settings_of` a model that may have to be fetched first.

    `note` is told what of `flags` and `sets` such a run does not read. A preset or a file is that of the
    training, whose other settings are not meant for it.
    """
    settings = settings_of(model, preset, file, flags, sets)
    local = with_local_models(settings, note)
    if model is not None and local.model.path != settings.model.path:
        of_model = settings_of(Path(str(local.model.path)), preset, file, flags, sets)
        local = with_local_models(of_model, note)
    local = with_protocol(local, note)
    typed = [setting.key for setting in typed_settings(None, flags, sets)]
    for line in unread_lines(local, typed, "eval", "local"):
        note(f"warning: {line}")
    return local


def preset_name(model: Path | None, preset: str | None, file: Path | None) -> str:
    """The name of the settings that `settings_of` returns: the preset's, the file's, or the model's run's."""
    if file is not None or preset is not None:
        return preset or Path(str(file)).stem
    run = _run_of(model)
    return RunRecord.read(run).preset if run is not None and (run / RECORD).is_file() else "defaults"


def _run_of(model: Path | None) -> Path | None:
    """The directory of the run whose checkpoint `model` is."""
    folder = None if model is None else model.resolve().parent
    return folder.parent if folder is not None and folder.name == CHECKPOINTS else None


def settings_of(
    model: Path | None,
    preset: str | None,
    file: Path | None,
    flags: Mapping[str, object],
    sets: Sequence[str],
) -> Config:
    """The configuration to measure `model` with: that of `file`, of `preset`, or of the model's own run.

    Without any of these it is the defaults, Search-R1's sizes. Without a `model`, a server's is measured. The
    template is the model's, if its `srl.json` names one and `file` does not. An index or a server in `flags`
    replaces whatever was searched in training. The cassette and the expected digest of the model's run do not
    apply.
    """
    run, card = _run_of(model), {} if model is None else read_card(model)
    cleared = ["model.lora_rank=0", "model.gradient_checkpointing=false"]
    cleared += [] if model is None else ["model.tokenizer=null"]
    is_runs = file is None and preset is None and run is not None and (run / SAVED).is_file()
    if is_runs:
        cleared += ["search.cassette=null", "search.digest=null"]
    layers = read_layers(preset, run / SAVED if run is not None and is_runs else file)
    talk = {
        "data.template": _template_of(card),
        "rollout.search": card.get("search"),
        "rollout.protocol": card.get("protocol"),
        "model.chat_template_kwargs": card.get("chat_template_kwargs"),
    }
    settings = flatten({key: value for key, value in talk.items() if value is not None}, ABOUT)
    layers.insert(len(layers) - (file is not None), Layer(list(settings)))
    searched = {"search.index", "search.url"}
    if replaced := {key for key in searched if flags.get(key) is not None}:
        cleared += ["data.corpus=null", *(f"{key}=null" for key in sorted(searched - replaced))]
    typed = typed_settings(None, {"model.path": model, **flags}, [*cleared, *sets])
    return resolve(layers, typed, trains=False).config


def _template_of(about: Mapping[str, Any]) -> object:
    """The model's template; None for a template file that no longer exists, so that the run's is used."""
    name = about.get("template")
    return None if isinstance(name, str) and name not in TEMPLATES and not Path(name).is_file() else name
