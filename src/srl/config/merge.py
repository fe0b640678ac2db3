"""Values put over each other key by key, each with its origin, and what is said when one does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from srl.config.schema import Config, Path, flat, keys, place, plain, takes
from srl.errors import UserError, nearest
from srl.renamed import KEYS

State = dict[Path, tuple[Any, str]]
"""Every value with its origin."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value that a layer gives."""

    path: Path
    value: Any
    origin: str
    old_key: str = ""
    """Where the value was given by an old name of its key: that name."""


def defaults() -> State:
    """Every key with its default."""
    return {path: (value, "default") for path, value in flat(Config().model_dump())}


def put(state: State, entry: Entry) -> None:
    """Set one value; what lay below it or above it (a mapping set as a whole) is gone."""
    path = entry.path
    for other in [other for other in state if other[: len(path)] == path or path[: len(other)] == other]:
        del state[other]
    if isinstance(entry.value, Mapping) and entry.value:
        state |= {below: (value, entry.origin) for below, value in flat(entry.value, path)}
    else:
        state[path] = (entry.value, entry.origin)


def build(state: State) -> Config:
    """The configuration that `state` makes. Raises UserError for the first value that does not fit."""
    tree: dict[str, Any] = {}
    for path, (value, _) in state.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_first_wrong(error, state)) from error


def flatten(tree: Mapping[str, Any], origin: Callable[[Path], str], base: Path = ()) -> Iterator[Entry]:
    """The values in a nested mapping, one by one; dotted keys count as nested ones.

    Raises UserError for a key that does not exist and for a value where a section belongs.
    """
    for key, value in tree.items():
        given = split_key(key, base)
        path, old_key = _current(given)
        kind, field = place(path)
        is_plugin = kind == "free" and len(path) == 2 and field is None
        if kind == "unknown" or (is_plugin and not isinstance(value, Mapping | None)):
            raise UserError(f"{origin(given)}: no key {'.'.join(path)!r}{_suggestion(path)}")
        if isinstance(value, Mapping) and (kind == "section" or (kind == "free" and value)):
            yield from flatten(value, origin, given)
        elif kind == "section" and value is not None:
            raise UserError(f"{origin(given)}: {'.'.join(path)} is {reveal(value)}, expected keys under it")
        elif kind != "section" and not (is_plugin and value is None):
            yield Entry(path, value, origin(given), old_key)


def _current(given: Path) -> tuple[Path, str]:
    """The key by its name of today, and where `given` has an old one, that."""
    for old, new in KEYS.items():
        parts = tuple(old.split("."))
        if given[: len(parts)] == parts:
            return (*new.split("."), *given[len(parts) :]), old
    return given, ""


def split_key(key: str, base: Path = ()) -> Path:
    """The path of a dotted key below `base`; a plugin's `package.module:Class` stays one part.

    >>> split_key("reward.weights.my.rewards:Brevity")
    ('reward', 'weights', 'my.rewards:Brevity')
    """
    path = (*base, *key.split("."))
    colon = next((place for place, part in enumerate(path) if ":" in part), 0)
    start = 2 if path[:2] == ("reward", "weights") else 1
    if path[0] not in ("retriever", "reward", "algorithm") or colon <= start:
        return path
    return (*path[:start], ".".join(path[start : colon + 1]), *path[colon + 1 :])


def _suggestion(path: Path) -> str:
    """The nearest key: the same last part in the same section, a neighbour, the same last part, any."""
    known = [key.name for key in keys()]
    here = ".".join(path)
    same = [name for name in known if name.split(".")[-1] == path[-1]]
    for names in ([name for name in same if name.split(".")[0] == path[0]], same):
        if names:
            return f"; did you mean {' or '.join(map(repr, names[:3]))}?"
    neighbours = [name for name in known if name.split(".")[:-1] == list(path[:-1])]
    return nearest(here, neighbours) or nearest(here, known) or "; `srl train --print-config` lists all keys"


def _first_wrong(error: ValidationError, state: State) -> str:
    """One line about the first value that does not fit."""
    first, *_ = error.errors(include_url=False)
    location = tuple(str(part) for part in first["loc"])
    path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in state), location)
    value, origin = state.get(path, (first["input"], "default"))
    return wrong(path, value, origin)


def reveal(value: Any) -> str:
    """A value as messages show it, cut where it is long."""
    text = repr(plain(value))
    return text if len(text) <= 80 else f"{text[:79]}…"


def wrong(path: Path, value: Any, origin: str) -> str:
    field = place(path)[1]
    inside_mapping = field is not None and place(path[:-1])[0] == "mapping"
    expected = "number" if inside_mapping else takes(field) if field else "something else"
    return f"{origin}: {'.'.join(path)} is {reveal(value)}, expected {expected}"
