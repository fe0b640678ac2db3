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
    known = list(model.model_fields)
    for key in options:
        if key not in known:
            there_are = f"there are {', '.join(known)}" if known else "it has none"
            raise UserError(f"no option {where}.{key}: {there_are}{nearest(key, known)}")
    try:
        return model(**options)
    except ValidationError as error:
        raise UserError(_first(where, error)) from error


def runtime_options(model: type[BaseModel]) -> set[str]:
    """The options of the machine, not of the index: those with `json_schema_extra={"runtime": True}`."""
    extras = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    return {name for name, extra in extras.items() if isinstance(extra, Mapping) and extra.get("runtime")}


def _first(where: str, error: ValidationError) -> str:
    """One line about the first thing wrong, and how many more there are."""
    first, *rest = error.errors(include_url=False)
    key = ".".join((where, *map(str, first["loc"])))
    if first["type"] == "extra_forbidden":
        return f"no option {key}; remove it"
    given = first["input"]
    may_hold_a_key = isinstance(given, Mapping | list | tuple) or "://" in str(given)
    is_shown = first["type"] != "missing" and not may_hold_a_key
    found = f"{key} is {quoted(repr(given), 60)}, " if is_shown else f"{key}: "
    more = f"; and {len(rest)} more" if rest else ""
    return f"{found}{expected(first)}{more}; type: --set {key}=VALUE"
