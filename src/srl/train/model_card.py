"""`srl.json` beside a model's weights: how the model was trained to talk, and with which indexes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import FORMAT, check_format, write_json
from srl.manifests import ABOUT
from srl.protocol import Template
from srl.train.search import IndexDigests


def model_card(template: Template, digests: IndexDigests | None = None) -> dict[str, Any]:
    """The fields of `srl.json`: template, search, and the digests of the indexes used in training."""
    indexes = {} if digests is None else digests.as_fields()
    return {"template": template.name, "search": template.searches, **indexes}


def write_card(file: Path, card: dict[str, Any]) -> None:
    """Write `card` to `file` with its format number."""
    write_json(file, {"format": FORMAT, **card})


def read_card(model: Path) -> dict[str, Any]:
    """What `srl.json` in the directory `model` says; nothing where it is absent. Raises UserError."""
    path = model / ABOUT
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    if not isinstance(known, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(known).__name__}")
    check_format(path, known.get("format"))
    return known
