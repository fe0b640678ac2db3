"""Hydra's syntax: overrides `a.b=value`, and references `${a.b}` replaced by what they refer to."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./-]*)(@[\w.]+)?(?:=(.*))?", re.DOTALL)
_WHOLE = re.compile(r"[-+]?\d+(?:_\d+)*")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 20


def read_override(text: str) -> tuple[str, Any, bool] | None:
    """Key and value of `a.b=value`, and whether a `+` before it adds the key; of `~a.b` the value is None.

    None where it is no override. A choice of a config group keeps its `@` in the key.
    """
    found = _OVERRIDE.fullmatch(text)
    if not found or (found[4] is None) != (found[1] == "~"):
        return None
    return found[2] + (found[3] or ""), read_value(found[4] or "null"), "+" in found[1]


def read_value(text: str) -> Any:
    """A value: `[a, b]`, `{a: b}`, quoted or plain. What is neither of these stays the text it is."""
    try:
        reader = _Values(text)
        value = reader.value("", 0)
        return value if reader.at_end else text.strip()
    except ValueError:
        return text.strip()


class _Values:
    """Reads one value from its beginning. Raises ValueError where it does not end as it should."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    @property
    def at_end(self) -> bool:
        return not self._text[self._at :].strip()

    def value(self, ends: str, depth: int) -> Any:
        """The value up to one of the signs in `ends`, or to the end of the text."""
        self._blank()
        first = self._text[self._at : self._at + 1]
        if first in ("[", "{") and depth > _DEEPEST:
            raise ValueError("too deep")
        if first == "[":
            return [item for item, _ in self._items("]", depth)]
        if first == "{":
            return dict(self._pairs(depth))
        if first in ("'", '"'):
            return self._quoted(first)
        return _plain(self._until(ends))

    def _items(self, closing: str, depth: int) -> list[tuple[Any, Any]]:
        """What stands between the bracket here and `closing`, each with what follows its colon."""
        self._at += 1
        found: list[tuple[Any, Any]] = []
        self._blank()
        while self._text[self._at : self._at + 1] != closing:
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
            self._blank()
        self._at += 1
        return found

    def _pairs(self, depth: int) -> list[tuple[str, Any]]:
        return [(str(key), item) for key, item in self._items("}", depth)]

    def _quoted(self, quote: str) -> str:
        end = self._text.find(quote, self._at + 1)
        if end < 0:
            raise ValueError("not closed")
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _until(self, ends: str) -> str:
        """Plain text up to one of the signs in `ends`; those in `${…}` do not end it."""
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ends:
            if self._text.startswith("${", self._at):
                self._at = self._text.index("}", self._at)
            self._at += 1
        return self._text[start : self._at].strip()

    def _blank(self) -> None:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1

    def _next(self) -> str:
        self._blank()
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


_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_ROUNDS = 10
_LONGEST = 2**14


class Dangling(Exception):  # noqa: N818 - a finding, not a failure of ours
    """A reference to what stands nowhere."""


def resolved(
    settings: Mapping[str, Any], known: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings with their references replaced, and those left out with the reference that is dangling.

    A reference is to a key in `known`, or with `oc.env:` to a variable in `given`.
    """
    found: dict[str, Any] = {}
    dangling: dict[str, str] = {}
    for key, value in settings.items():
        try:
            found[key] = _of(value, key, known, given, _ROUNDS)
        except Dangling as missing:
            dangling[key] = str(missing)
    return found, dangling


def _of(
    value: Any, key: str, known: Mapping[str, Any], given: Mapping[str, str], rounds: int
) -> Any:  # fmt: skip
    if isinstance(value, list):
        return [_of(item, key, known, given, rounds) for item in value]
    if not isinstance(value, str):
        return value
    while (found := _REFERENCE.search(value)) is not None:
        if rounds == 0:
            raise Dangling(found[0])
        rounds -= 1
        held = _held(found[1].strip(), key, known, given, rounds)
        if found[0] == value.strip():
            return held
        value = value[: found.start()] + ("" if held is None else str(held)) + value[found.end() :]
        if len(value) > _LONGEST:
            raise Dangling(found[0])
    return value


def _held(
    name: str, key: str, known: Mapping[str, Any], given: Mapping[str, str], rounds: int
) -> Any:  # fmt: skip
    """What `${name}` stands for at `key`."""
    resolver, colon, argument = name.partition(":")
    if not colon:
        return _looked_up(name, key, known, given, rounds)
    wanted, comma, otherwise = argument.partition(",")
    if resolver == "oc.select":
        try:
            return _looked_up(wanted.strip(), key, known, given, rounds)
        except Dangling:
            if comma:
                return read_value(otherwise)
            raise
    if resolver == "oc.env" and (wanted.strip() in given or comma):
        return given.get(wanted.strip(), read_value(otherwise))
    raise Dangling(f"${{{name}}}")


def _looked_up(
    name: str, key: str, known: Mapping[str, Any], given: Mapping[str, str], rounds: int
) -> Any:  # fmt: skip
    """The setting that `name` refers to; dots before it count sections up from that of `key`."""
    bare = name.lstrip(".")
    up = len(name) - len(bare)
    wanted = ".".join([*key.split(".")[:-up], bare]) if up else name
    below = [other for other in known if other == wanted or other.startswith(f"{wanted}.")]
    if not below or rounds == 0:
        raise Dangling(f"${{{name}}}")
    values = {other: _of(known[other], other, known, given, rounds - 1) for other in below}
    return values[wanted] if wanted in values else _section(values, len(wanted) + 1)


def _section(values: Mapping[str, Any], start: int) -> dict[str, Any]:
    """The mapping that these dotted keys make, each from its character `start` on."""
    tree: dict[str, Any] = {}
    for key, value in values.items():
        node = tree
        *outer, last = key[start:].split(".")
        for part in outer:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise Dangling(f"${{{key}}}")
        node[last] = value
    return tree
