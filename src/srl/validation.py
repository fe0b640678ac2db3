"""Values that do not fit: what pydantic found wrong, in our own words, and what is no JSON."""

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
"""What is expected where an error's type begins with the name."""
_BOUNDS = {"greater_than": ">", "greater_than_equal": "≥", "less_than": "<", "less_than_equal": "≤"}


def expected(error: Mapping[str, Any]) -> str:
    """`expected an integer` for one of the errors that a ValidationError lists.

    What a validator of a plugin's own says is left as it is.
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
    """Refuses NaN, Infinity and -Infinity, which Python's `json` reads and JSON does not have."""
    raise ValueError(f"{name} is not a number of JSON")
