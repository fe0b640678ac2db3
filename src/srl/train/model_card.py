"""`srl.json` beside a model's weights: how the model was trained to talk, and with which indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from srl.config import Config
from srl.config.sections import Model
from srl.files import ABOUT, FORMAT, check_format, json_object, write_json
from srl.models.hub import hub_name
from srl.protocol import STOP_STRINGS
from srl.rollout.protocol import Protocol
from srl.train.questions import takes_written_prompts


def model_card(
    protocol: Protocol, section: Model, indexes: Mapping[str, str] | None = None, start: str | None = None
) -> dict[str, Any]:
    """The fields of `srl.json`: template, search, what its chat template is called with, how it calls tools,
    and the digests of the indexes used in training by the name of their retriever, "" for the default one.

    `base_model` is the published model that the training began with, where the directory `start` is one.
    """
    base = {} if start is None else base_model(Path(start))
    card = {"template": protocol.template.name, "search": protocol.template.searches, **protocol.card, **base}
    if section.chat_template_kwargs:
        card["chat_template_kwargs"] = section.chat_template_kwargs
    return card if indexes is None else {**card, "indexes": dict(indexes)}


def card_of_run(config: Config, protocol: Protocol, indexes: Mapping[str, str]) -> dict[str, Any]:
    """The card of what a run trains. `template` is null where the run uses the prompts in its files, so that
    an evaluation uses them too."""
    card = model_card(protocol, config.model, indexes, config.model.path)
    return card | {"template": None} if takes_written_prompts(config) else card


def base_model(directory: Path) -> dict[str, str]:
    """The field `base_model`: the name on the hub with its commit, or what `srl.json` in `directory` says."""
    name = hub_name(directory) or str(read_card(directory).get("base_model", ""))
    return {"base_model": name} if name else {}


def stop_strings(card: Mapping[str, Any]) -> Sequence[str]:
    """Where turns of the card's model end besides at EOS."""
    return () if card.get("protocol") == "native" else STOP_STRINGS


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
