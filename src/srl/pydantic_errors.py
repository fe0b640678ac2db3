"""Messages for invalid values: pydantic's errors in our words, and NaN in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "path": "a path",
    "none": "null",
    "missing": "a value",
}
"""The expected value, for errors whose type begins with the name."""
_BOUNDS = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}


def expected(error: Mapping[str, Any]) -> str:
    """`expected an integer` for one error of a ValidationError.

    The message of a plugin's own validator is returned unchanged.
    """
    kind, known = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        return f"expected a number {_BOUNDS[kind]} {next(iter(known.values())):g}"
    if kind in ("literal_error", "enum"):
        return f"expected one of {known['expected'].replace(' or ', ', ')}"
    if kind == "string_pattern_mismatch":
        return f"expected text like {known['pattern']}"
    named = [words for name, words in _TYPES.items() if kind.startswith(name)]
    return f"expected {named[0]}" if named else str(error["msg"]).removeprefix("Value error, ")


def no_constant(name: str) -> object:
    """Reject NaN, Infinity and -Infinity, which Python's `json` accepts although JSON does not have them."""
    raise ValueError(f"{name} is not a JSON number")
