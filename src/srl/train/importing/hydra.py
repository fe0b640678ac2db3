"""Hydra's syntax: overrides such as `a.b=[1,x]`, and references such as `${a.b}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./-]*)(@[\w.]+)?(?:=(.*))?", re.DOTALL)
_WHOLE = re.compile(r"[-+]?\d+(?:_\d+)*")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 20
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_ROUNDS = 10
"""References that may lead over others; a circle has no end."""
_MAX_LENGTH = 2**14


def read_override(text: str) -> tuple[str, Any, bool] | None:
    """Key and value of `a.b=value`, and whether a `+` before it adds the key; None if it is no override.

    The value of `~a.b` is None. A choice of a config group keeps its `@` in the key.
    """
    found = _OVERRIDE.fullmatch(text)
    if not found or (found[4] is None) != (found[1] == "~"):
        return None
    return found[2] + (found[3] or ""), read_value(found[4] or "null"), "+" in found[1]


def read_value(text: str) -> Any:
    """A value: `[a, b]`, `{a: b}`, quoted or plain; whatever is malformed is returned as text."""
    try:
        reader = _ValueReader(text)
        value = reader.value("", 0)
        return value if reader.at_end else text.strip()
    except ValueError:
        return text.strip()


class _ValueReader:
    """Reads one value from the beginning of `text`. Raises ValueError where it is malformed."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def value(self, ends: str, depth: int) -> Any:
        """The value up to one of the characters in `ends`, or to the end of the text."""
        self._skip_blank()
        first = self._text[self._at : self._at + 1]
        if first in ("[", "{") and depth > _MAX_DEPTH:
            raise ValueError("too deep")
        if first == "[":
            return [item for item, _ in self._items("]", depth)]
        if first == "{":
            return {str(key): item for key, item in self._items("}", depth)}
        if first in ("'", '"'):
            return self._quoted(first)
        return _plain(self._until(ends))

    def _items(self, closing: str, depth: int) -> list[tuple[Any, Any]]:
        """What is between this bracket and `closing`, each with what follows its colon."""
        self._at += 1
        found: list[tuple[Any, Any]] = []
        while self._next() != closing:
            key = self.value(f",:{closing}" if closing == "}" else f",{closing}", depth + 1)
            item = None
            if closing == "}" and self._next() == ":":
                self._at += 1
                item = self.value(f",{closing}", depth + 1)
            found.append((key, item))
            if self._next() == ",":
                self._at += 1
            elif self._next() != closing:
                raise ValueError("neither a comma nor the end")
        self._at += 1
        return found

    def _quoted(self, quote: str) -> str:
        end = self._text.index(quote, self._at + 1)
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _until(self, ends: str) -> str:
        """Plain text up to one of the characters in `ends` that is not inside `${…}`."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            if self._text.startswith("${", self._at):
                self._at = self._text.index("}", self._at)
            self._at += 1
        return self._text[start : self._at].strip()

    def _skip_blank(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _next(self) -> str:
        self._skip_blank()
        if self._at >= len(self._text):
            raise ValueError("not closed")
        return self._text[self._at]


def _plain(text: str) -> Any:
    """true, false, null, a number, or the text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


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
        except _UndefinedError as error:
            undefined[key] = str(error)
    return found, undefined


class _UndefinedError(Exception):
    """A reference to something undefined, or to itself."""


class _Resolver:
    """Resolves references to the settings in `known` and the variables in `given`."""

    def __init__(self, known: Mapping[str, Any], given: Mapping[str, str]) -> None:
        self._known, self._given = known, given

    def resolve(self, value: Any, key: str, rounds: int = _MAX_ROUNDS) -> Any:
        """The value of `key` without references. Raises _UndefinedError."""
        if isinstance(value, list):
            return [self.resolve(item, key, rounds) for item in value]
        if not isinstance(value, str):
            return value
        while (found := _REFERENCE.search(value)) is not None:
            if rounds == 0:
                raise _UndefinedError(found[0])
            rounds -= 1
            held = self._reference(found[1].strip(), key, rounds)
            if found[0] == value.strip():
                return held
            value = value[: found.start()] + ("" if held is None else str(held)) + value[found.end() :]
            if len(value) > _MAX_LENGTH:
                raise _UndefinedError(found[0])
        return value

    def _reference(self, name: str, key: str, rounds: int) -> Any:
        """What `${name}` stands for at `key`."""
        function, colon, argument = name.partition(":")
        if not colon:
            return self._setting(name, key, rounds)
        wanted, comma, default = argument.partition(",")
        wanted = wanted.strip()
        if function == "oc.select":
            try:
                return self._setting(wanted, key, rounds)
            except _UndefinedError:
                if comma:
                    return read_value(default)
                raise
        if function == "oc.env" and (wanted in self._given or comma):
            return self._given.get(wanted, read_value(default))
        raise _UndefinedError(f"${{{name}}}")

    def _setting(self, name: str, key: str, rounds: int) -> Any:
        """The setting or section called `name`; leading dots count sections up from that of `key`."""
        bare = name.lstrip(".")
        up = len(name) - len(bare)
        wanted = ".".join([*key.split(".")[:-up], bare]) if up else name
        below = [other for other in self._known if other == wanted or other.startswith(f"{wanted}.")]
        if not below or rounds == 0:
            raise _UndefinedError(f"${{{name}}}")
        values = {other: self.resolve(self._known[other], other, rounds - 1) for other in below}
        if wanted in values:
            return values[wanted]
        try:
            return nested({other[len(wanted) + 1 :]: value for other, value in values.items()})
        except ValueError as error:
            raise _UndefinedError(f"${{{name}}}") from error
