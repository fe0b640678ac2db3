"""`srl.json` beside a model's weights: how the model was trained to talk, and with which indexes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.files import ABOUT, FORMAT, check_format, json_object, write_json
from srl.models.hub import hub_name
from srl.protocol import Template
from srl.train.questions import is_native, takes_written_prompts


def model_card(
    template: Template, indexes: Mapping[str, str] | None = None, start: str | None = None
) -> dict[str, Any]:
    """The fields of `srl.json`: template, search, and the digests of the indexes used in training by the name
    of their retriever, "" for the default one.

    `base_model` is the published model that the training began with, where the directory `start` is one.
    """
    base = {} if start is None else base_model(Path(start))
    card = {"template": template.name, "search": template.searches, **base}
    return card if indexes is None else {**card, "indexes": dict(indexes)}


def card_of_run(config: Config, template: Template, indexes: Mapping[str, str]) -> dict[str, Any]:
    """The card of what a run trains. `template` is null where the run uses the prompts in its files, so that
    an evaluation uses them too."""
    card = model_card(template, indexes, config.model.path)
    card |= protocol_of(config)
    return card | {"template": None} if takes_written_prompts(config) else card


def protocol_of(config: Config) -> dict[str, str]:
    """The field `protocol` of a model that calls tools in its own way; nothing for one that writes tags."""
    return {"protocol": "native"} if is_native(config) else {}


def base_model(directory: Path) -> dict[str, str]:
    """The field `base_model`: the name on the hub with its commit, or what `srl.json` in `directory` says."""
    name = hub_name(directory) or str(read_card(directory).get("base_model", ""))
    return {"base_model": name} if name else {}


def write_card(file: Path, card: dict[str, Any]) -> None:
    """Write `card` to `file` with its format number."""
    write_json(file, {"format": FORMAT, **card})


def read_card(model: Path) -> dict[str, Any]:
    """What `srl.json` in the directory `model` says; nothing where it is absent. Raises UserError."""
    path = model / ABOUT
    if not path.is_file():
        return {}
    card = json_object(path.read_bytes(), str(path))
    check_format(path, card.get("format"))
    return card
