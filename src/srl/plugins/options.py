"""Plugin options: checked against the plugin's pydantic model, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from srl.errors import UserError, expected, nearest
from srl.safe import quoted


def validated(where: str, model: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
    """An instance of `model`; `where` begins the dotted key in errors, as in `retriever.bm25`.

    Raises UserError for a key that the model does not have, whatever the model says of extra keys.
    """
    names = list(model.model_fields)
    for name in options:
        if name not in names:
            there_are = f"there are {', '.join(names)}" if names else "it has none"
            key = f"{where}.{name}"
            raise UserError(f"no option {key}: {there_are}{nearest(name, names)}", key=key)
    try:
        return model(**options)
    except ValidationError as error:
        first, *further = error.errors(include_url=False)
        key = ".".join((where, *map(str, first["loc"])))
        value = first["input"]
        may_hold_a_secret = isinstance(value, Mapping | list | tuple) or "://" in str(value)
        is_shown = first["type"] != "missing" and not may_hold_a_secret
        what = f"{key} is {quoted(repr(value), 60)}, " if is_shown else f"{key}: "
        more = f"; and {len(further)} more" if further else ""
        hint = f"type: --set {key}=VALUE" if first["loc"] else ""
        raise UserError(f"{what}{expected(first)}{more}", key=key, hint=hint) from error


def runtime_options(model: type[BaseModel]) -> set[str]:
    """The options of the machine, not of the index: those with `json_schema_extra={"runtime": True}`."""
    extras = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    return {name for name, extra in extras.items() if isinstance(extra, Mapping) and extra.get("runtime")}
