"""Values by key as a layer sets them, and the errors for unknown keys and invalid values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pydantic import ValidationError

from srl.config.keys import Config, KeyPath, flat, keys, place, plain, split_key
from srl.config.sections import Takes
from srl.errors import UserError, expected

Values = dict[KeyPath, tuple[Any, str]]
"""Every value with its origin, by key."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value from one layer."""

    path: KeyPath
    value: Any
    origin: str

    @property
    def key(self) -> str:
        """The key with its dots."""
        return ".".join(self.path)


def flatten(
    tree: Mapping[str, Any], origin: Callable[[KeyPath], str], base: KeyPath = ()
) -> Iterator[Setting]:
    """The settings in a nested mapping; a dotted key means the same as nested ones.

    Raises UserError for an unknown key, and for a value where a section is expected.
    """
    for name, value in tree.items():
        path = split_key(name, base)
        key, (kind, field) = ".".join(path), place(path)
        is_plugin = kind == "free" and len(path) == 2 and field is None
        if kind == "unknown" or (is_plugin and not isinstance(value, Mapping | None)):
            hint = "`srl train --print-config` lists all keys"
            near = [repr(each) for each in _nearest(path)]
            raise UserError(
                f"{origin(path)}: no key {key!r}",
                key=key,
                hint=f"did you mean {' or '.join(near)}?" if near else hint,
            )
        if path[:-1] == ("search", "retrievers") and not value:
            raise UserError(f"{origin(path)}: {key} is empty", key=key, hint=f"--set {key}.url=URL")
        if isinstance(value, Mapping) and (kind == "section" or (kind == "free" and value)):
            yield from flatten(value, origin, path)
        elif kind == "section" and value is not None:
            raise UserError(f"{origin(path)}: {key} is {reveal(value)}, expected keys under it", key=key)
        elif kind != "section" and not (is_plugin and value is None):
            yield Setting(path, value, origin(path))


def _nearest(path: KeyPath) -> list[str]:
    """Keys that may be meant: with the same last part, those of the same section first; else one alike."""
    every = [key.name for key in keys()]
    same = [name for name in every if name.rpartition(".")[2] == path[-1]]
    inside = [name for name in same if name.split(".")[0] == path[0]]
    return (inside or same or get_close_matches(".".join(path), every, n=1))[:3]


def defaults() -> Values:
    """Every key with its default."""
    return {path: (value, "default") for path, value in flat(Config().model_dump())}


def put(values: Values, setting: Setting) -> None:
    """Set one value. It replaces the values below its key, and a mapping above it that was set as a whole."""
    path = setting.path
    for key in [key for key in values if key[: len(path)] == path or path[: len(key)] == key]:
        del values[key]
    if isinstance(setting.value, Mapping) and setting.value:
        values |= {below: (value, setting.origin) for below, value in flat(setting.value, path)}
    else:
        values[path] = (setting.value, setting.origin)


def build(values: Values) -> Config:
    """The configuration made of `values`. Raises UserError for the first invalid value."""
    tree: dict[str, Any] = {}
    for path, (value, _) in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first, *_ = error.errors(include_url=False)
        location = tuple(str(part) for part in first["loc"])
        path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in values), location)
        below = [origin for key, (_, origin) in values.items() if key[: len(location)] == location]
        value, origin = values.get(path, (first["input"], below[-1] if below else "default"))
        is_secret = path[-1] == "key_variable"  # where the key itself may be given by mistake
        shown, key = "a text that is not shown" if is_secret else reveal(value), ".".join(path)
        field = place(path)[1]
        words = next((mark.words for mark in field.metadata if isinstance(mark, Takes)), "") if field else ""
        why = f"expected {words}" if words else expected(first)
        raise UserError(f"{origin}: {key} is {shown}: {why}", key=key) from error


def reveal(value: Any) -> str:
    """A value for a message, truncated to 80 characters."""
    text = repr(plain(value))
    return text if len(text) <= 80 else f"{text[:79]}…"
