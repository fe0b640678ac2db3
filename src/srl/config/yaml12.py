"""YAML 1.2 on top of PyYAML: 1e-6 is a number, `no` is text, duplicate keys are errors, keys have line
numbers.

PyYAML implements YAML 1.1, where 1e-6 is text and 1:30 is a number. Here plain scalars follow the core schema
of YAML 1.2. Text is written with quotes wherever either version would read it as something else.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from srl.errors import UserError, first_line

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


class _Dumper(yaml.SafeDumper):
    """A safe dumper without anchors. Quotes text that YAML 1.1 or 1.2 would read as a value."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


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
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, None if text.isprintable() else '"')


_Dumper.add_representer(str, _text)
_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:float", lambda loader, node: float(node.value))
for _tag, (_pattern, _first) in _CORE.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [c.strip("\0") for c in _first]
        )


def parse(text: str, name: str) -> Any:
    """The one document in `text`; mappings are `Lined`. Raises UserError naming `name` and the line."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{name}{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{name}: not YAML: {first_line(error)}") from error


def dump(value: Any) -> str:
    """`value` as block-style YAML, which `parse` reads back unchanged."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
