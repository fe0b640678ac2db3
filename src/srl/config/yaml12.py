"""YAML as it is meant: 1e-6 is a number, `no` is a word, a key stands once, and each has its line.

PyYAML speaks YAML 1.1, where 1e-6 is text and 1:30 a number. Here plain words are read by the rules of
YAML 1.2's core schema. What is written is quoted wherever either version would take it for something else.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from srl.errors import UserError

_CORE = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+", "-+0123456789"),
    "float": (r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    "null": (r"~|null|Null|NULL|", "~nN\0"),
}


class Lined(dict[Any, Any]):
    """A mapping that knows the line of each of its keys, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class _Loader(yaml.SafeLoader):
    """Safe, with YAML 1.2's plain words, and mappings that know their lines and refuse a key twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Safe, without anchors; quotes what looks like a value to YAML 1.1 or to 1.2."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Lined:
    found = Lined()
    for key_node, value_node in node.value:
        key, line = loader.construct_object(key_node, deep=True), key_node.start_mark.line + 1
        problem = "" if isinstance(key, str) else f"the key {key!r} is not text"
        if not problem and key in found:
            problem = f"the key {key!r} stands in line {found.lines[key]} already"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        found[key] = loader.construct_object(value_node, deep=True)
        found.lines[key] = line
    return found


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Escapes what cannot be printed, which PyYAML would break lines at in other styles."""
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
        raise UserError(f"{name}: not YAML: {str(error).splitlines()[0]}") from error


def dump(value: Any) -> str:
    """`value` as block-style YAML that `parse` reads back as the same."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
