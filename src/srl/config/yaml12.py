"""YAML 1.2 on top of PyYAML: 1e-6 is a number, `no` is text, duplicate keys are errors, keys have line
numbers.

PyYAML implements YAML 1.1, where 1e-6 is text and 1:30 is a number. Here scalars follow the core schema of
YAML 1.2, and there are no other tags. Text is written with quotes wherever either version would read it as
something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from srl.errors import UserError, first_line, parsing

MOST_VALUES = 100_000
"""Values of a document with its aliases written out: a short text of aliases of aliases has billions."""
_TAG = "tag:yaml.org,2002:"
_CORE = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    "null": (r"~|null|Null|NULL|", "~nN\0"),
}


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

    def get_single_node(self) -> Any:
        """The document's node. Raises MarkedYAMLError where its aliases make it too large."""
        node = super().get_single_node()
        if node is not None and _values(node, {}) > MOST_VALUES:
            raise yaml.MarkedYAMLError(problem=f"with its aliases it has more than {MOST_VALUES:,} values")
        return node


class _Dumper(yaml.SafeDumper):
    """A safe dumper without anchors. Quotes text that YAML 1.1 or 1.2 would read as a value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """The values in `node`, those of an alias each time; those `known` by identity are not counted again."""
    if id(node) not in known:
        known[id(node)] = MOST_VALUES + 1  # an alias of itself has no end
        below = (
            [part for pair in node.value for part in pair]
            if isinstance(node, yaml.MappingNode)
            else (node.value if isinstance(node, yaml.SequenceNode) else [])
        )
        known[id(node)] = 1 + sum(_values(part, known) for part in below)
    return known[id(node)]


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Lined:
    found = Lined()
    for key_node, value_node in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
        problem = "" if isinstance(key, str) else f"the key {key!r} is not text"
        if not problem and key in found:
            problem = f"duplicate key {key!r}, first in line {found.lines[key]}"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
        found.lines[key] = line
    return found


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escapes unprintable characters, at which PyYAML breaks lines in other styles."""
    return dumper.represent_scalar(f"{_TAG}str", text, None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)


def _scalar(name: str, convert: Callable[[str], Any]) -> Callable[[_Loader, yaml.ScalarNode], Any]:
    """Reads a value of the tag `name`, which may stand before it: `!!bool x` is none."""

    def read(loader: _Loader, node: yaml.ScalarNode) -> Any:
        text = loader.construct_scalar(node)
        if not re.fullmatch(_CORE[name][0], text):
            raise yaml.MarkedYAMLError(problem=f"{text!r:.60} is no {name}", problem_mark=node.start_mark)
        return convert(text)

    return read


_VALUES: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() == "true", "int": int, "float": float, "null": lambda text: None,
}  # fmt: skip
_Loader.add_constructor(f"{_TAG}map", _mapping)
for _name, (_pattern, _first) in _CORE.items():
    _Loader.add_constructor(f"{_TAG}{_name}", _scalar(_name, _VALUES[_name]))
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
