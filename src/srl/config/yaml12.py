"""YAML 1.2 on top of PyYAML: 1e-6 is a number, `no` is text, duplicate keys are errors, keys have line
numbers.

PyYAML implements YAML 1.1, where 1e-6 is text and 1:30 is a number. Here scalars follow the core schema of
YAML 1.2; there are no other tags and no aliases. Text is written with quotes wherever either version would
read it as something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from srl.errors import UserError, first_line, parsing

_TAG = "tag:yaml.org,2002:"
_BOOLS = {"true": True, "false": False}
_CORE: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF", lambda text: _BOOLS[text.lower()]),
    "int": (r"[-+]?[0-9]+", "-+0123456789", int),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789", float),
    "null": (r"~|null|Null|NULL|", "~nN\0", lambda text: None),
}
"""Plain scalars of YAML 1.2: pattern, first characters, and what the text means."""


class Lined(dict[Any, Any]):
    """A mapping with the line number of each key, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class _Loader(yaml.SafeLoader):
    """A safe loader with the plain scalars of YAML 1.2; mappings are `Lined` and refuse duplicate keys."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        f"{_TAG}str": yaml.SafeLoader.construct_yaml_str,
        f"{_TAG}seq": yaml.SafeLoader.construct_yaml_seq,
        None: yaml.SafeLoader.construct_undefined,
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A short text of aliases of aliases has billions of values, so that none is read."""
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases are not read", problem_mark=mark)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """A safe dumper without anchors. Quotes text that YAML 1.1 or 1.2 would read as a value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Lined:
    whole = Lined()
    for key_node, value_node in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
        problem = "" if isinstance(key, str) else f"the key {key!r} is not text"
        if not problem and key in whole:
            problem = f"duplicate key {key!r}, first in line {whole.lines[key]}"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        whole[key] = loader.construct_object(value_node, deep=True)
        whole.lines[key] = line
    return whole


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escapes unprintable characters, at which PyYAML breaks lines in other styles."""
    return dumper.represent_scalar(f"{_TAG}str", text, None if text.isprintable() else '"')


def _scalar(convert: Callable[[str], Any]) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    return lambda loader, node: convert(loader.construct_scalar(node))


_Dumper.add_representer(str, _text)
_Loader.add_constructor(f"{_TAG}map", _mapping)
for _name, (_pattern, _first, _convert) in _CORE.items():
    _Loader.add_constructor(f"{_TAG}{_name}", _scalar(_convert))
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"{_TAG}{_name}", re.compile(f"^(?:{_pattern})$"), [c.strip("\0") for c in _first]
        )


def parse(text: str, name: str) -> Any:
    """The one document in `text`; mappings are `Lined`. Raises UserError naming `name` and the line."""
    try:
        with parsing(name):
            return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{name}{line}: not YAML: {problem or first_line(error)}") from error


def dump(value: Any) -> str:
    """`value` as block-style YAML, which `parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
