"""`${a.b}` in a configuration of Hydra's: what it refers to, put in its place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    from srl.train.importing.hydra import read_value

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
