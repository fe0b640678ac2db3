"""Hydra's syntax: overrides such as `a.b=[1,x]`, and references such as `${a.b}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from srl.config.yaml12 import parse
from srl.errors import UserError

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./-]*)(@[\w.]+)?(?:=(.*))?", re.DOTALL)
_WHOLE = re.compile(r"[-+]?\d+(?:_\d+)*")
_FLOAT = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 10
"""References that may lead over others; a circle has no end."""
_MAX_LENGTH = 2**14


def read_override(text: str) -> tuple[str, Any, bool] | None:
    """Key and value of `a.b=value`, and whether a `+` before it adds the key; None if it is no override.

    The value of `~a.b` is None. A choice of a config group keeps its `@` in the key. Raises ValueError for a
    value that is malformed.
    """
    found = _OVERRIDE.fullmatch(text)
    if not found or (found[4] is None) != (found[1] == "~"):
        return None
    return found[2] + (found[3] or ""), read_value(found[4] or "null"), "+" in found[1]


def read_value(text: str) -> Any:
    """true, false, null, a number, text, quoted text, or a list of these. Raises ValueError for others."""
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if text.startswith(("[", "{")):
        return _read_list(text)
    if text.startswith(("'", '"')):
        if text.find(text[0], 1) != len(text) - 1:
            raise ValueError("expected one closing quote, at the end")
        return text[1:-1]
    return text


def _read_list(text: str) -> Any:
    """A list, in which Hydra's syntax is that of YAML, or `{}`; a mapping with keys is not."""
    if text == "{}":
        return {}
    if text.startswith("{"):
        raise ValueError("a mapping is not read; set each of its keys: NAME.KEY=VALUE")
    try:
        value = parse(text, "value")
    except UserError as error:
        raise ValueError("expected a list such as [1,a,'${b}']") from error
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, dict) and item:
            raise ValueError("a mapping in a list is not read")
        left += item if isinstance(item, list) else []
    return value


def nested(flat_keys: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of these dotted keys. Raises ValueError where a key is a value and a section at once."""
    tree: dict[str, Any] = {}
    for key, value in flat_keys.items():
        *outer, last = key.split(".")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ValueError(f"{key}: {part} is already set to {node!r} and cannot hold keys")
        node[last] = value
    return tree


def resolved(
    settings: Mapping[str, Any], known: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings with their references resolved, and those left out, each with its undefined reference.

    A reference is to a key in `known`, or with `oc.env:` to a variable in `given`.
    """
    resolver = _Resolver(known, given)
    found: dict[str, Any] = {}
    undefined: dict[str, str] = {}
    for key, value in settings.items():
        try:
            found[key] = resolver.resolve(value, key)
        except ValueError as error:
            undefined[key] = str(error)
    return found, undefined


class _Resolver:
    """Resolves references to the settings in `known` and the variables in `given`.

    Its methods raise ValueError with a reference to something undefined, or to itself.
    """

    def __init__(self, known: Mapping[str, Any], given: Mapping[str, str]) -> None:
        self._known, self._given = known, given

    def resolve(self, value: Any, key: str, rounds: int = _MAX_ROUNDS) -> Any:
        """The value of `key` without references."""
        if isinstance(value, list):
            return [self.resolve(item, key, rounds) for item in value]
        if not isinstance(value, str):
            return value
        while (found := _REFERENCE.search(value)) is not None:
            if rounds == 0 or len(value) > _MAX_LENGTH:
                raise ValueError(found[0])
            rounds -= 1
            held = self._reference(found[1].strip(), key, rounds)
            if found[0] == value.strip():
                return held
            value = value[: found.start()] + ("" if held is None else str(held)) + value[found.end() :]
        return value

    def _reference(self, name: str, key: str, rounds: int) -> Any:
        """What `${name}` stands for at `key`."""
        function, colon, argument = name.partition(":")
        if not colon:
            return self._setting(name, key, rounds)
        wanted, comma, default = (part.strip() for part in argument.partition(","))
        try:
            if function == "oc.select":
                return self._setting(wanted, key, rounds)
            if function == "oc.env" and wanted in self._given:
                return self._given[wanted]
        except ValueError:
            if not comma:
                raise
        if not comma or function not in ("oc.select", "oc.env"):
            raise ValueError(f"${{{name}}}")
        return read_value(default)

    def _setting(self, name: str, key: str, rounds: int) -> Any:
        """The setting or section called `name`; leading dots count sections up from that of `key`."""
        bare = name.lstrip(".")
        up = len(name) - len(bare)
        wanted = ".".join([*key.split(".")[:-up], bare]) if up else name
        below = [other for other in self._known if other == wanted or other.startswith(f"{wanted}.")]
        if not below or rounds == 0:
            raise ValueError(f"${{{name}}}")
        values = {other: self.resolve(self._known[other], other, rounds - 1) for other in below}
        if wanted in values:
            return values[wanted]
        return nested({other[len(wanted) + 1 :]: value for other, value in values.items()})
