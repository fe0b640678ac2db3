"""`a.b=value` as Hydra reads it: the key, and the value with its lists, mappings and quotes."""

from __future__ import annotations

import re
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
