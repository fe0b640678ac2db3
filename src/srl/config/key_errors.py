"""Values by key as a layer sets them, and the errors for unknown keys ("did you mean") and invalid values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from srl.config.keys import KeyPath, flat, keys, place, plain, split_key, takes
from srl.errors import UserError, nearest


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


_NAMED = "search", "retrievers"
"""Its keys are names that the user chooses, each a section."""


def flatten(
    tree: Mapping[str, Any], origin: Callable[[KeyPath], str], base: KeyPath = ()
) -> Iterator[Setting]:
    """The settings in a nested mapping; a dotted key means the same as nested ones.

    Raises UserError for an unknown key, and for a value where a section is expected.
    """
    for key, value in tree.items():
        path = split_key(key, base)
        kind, field = place(path)
        is_plugin = kind == "free" and len(path) == 2 and field is None
        if kind == "unknown" or (is_plugin and not isinstance(value, Mapping | None)):
            raise UserError(f"{origin(path)}: no key {'.'.join(path)!r}{_suggestion(path)}")
        if path[:-1] == _NAMED and not value:
            raise UserError(
                f"{origin(path)}: {'.'.join(path)} is empty; give it a url, an index or a retriever: "
                f"--set {'.'.join(path)}.url=URL"
            )
        if isinstance(value, Mapping) and (kind == "section" or (kind == "free" and value)):
            yield from flatten(value, origin, path)
        elif kind == "section" and value is not None:
            raise UserError(f"{origin(path)}: {'.'.join(path)} is {reveal(value)}, expected keys under it")
        elif kind != "section" and not (is_plugin and value is None):
            yield Setting(path, value, origin(path))


def _suggestion(path: KeyPath) -> str:
    """Suggests the closest key: in the same section by the last part, its spelling or its words, then the
    same last part anywhere, then by spelling."""
    known = [key.name for key in keys()]
    same = [name for name in known if name.split(".")[-1] == path[-1]]
    neighbours = [name for name in known if name.split(".")[:-1] == list(path[:-1])]
    words = set(path[-1].split("_"))
    alike = [name for name in neighbours if _share_all(words, set(name.split(".")[-1].split("_")))]
    misspelt = get_close_matches(".".join(path), neighbours, n=1, cutoff=0.9)
    for names in ([name for name in same if name.split(".")[0] == path[0]], misspelt, alike, same):
        if names:
            return f"; did you mean {' or '.join(map(repr, names[:3]))}?"
    here = ".".join(path)
    return nearest(here, neighbours) or nearest(here, known) or "; `srl train --print-config` lists all keys"


def _share_all(words: set[str], others: set[str]) -> bool:
    """Whether one name has all words of the other."""
    return words <= others or others <= words


KEY_NAMES = frozenset({"key_variable"})
"""Keys that take the name of a secret, and where the secret itself may be given by mistake."""


def reveal(value: Any) -> str:
    """A value for a message, truncated to 80 characters."""
    text = repr(plain(value))
    return text if len(text) <= 80 else f"{text[:79]}…"


def wrong(path: KeyPath, value: Any, origin: str) -> str:
    """The message for an invalid value."""
    field = place(path)[1]
    inside_mapping = field is not None and place(path[:-1])[0] == "mapping"
    expected = "number" if inside_mapping else takes(field) if field else "something else"
    shown = "a text that is not shown" if path[-1] in KEY_NAMES else reveal(value)
    said = f"{origin}: {'.'.join(path)} is {shown}, expected {expected}"
    if path[:2] == ("reward", "weights") and isinstance(value, Mapping) and value:
        (*module, name), weight = next(flat(value, path[2:]))
        return (
            f"{said}; for a class in a module, type: --set reward.weights.{'.'.join(module)}:{name}={weight}"
        )
    if path == ("model", "device") and value == "mps":
        return f"{said}: sampling takes float64, which mps does not have; set cpu"
    return said
