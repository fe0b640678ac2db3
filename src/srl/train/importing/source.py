"""A file of verl's or Search-R1's as flat settings: YAML, a list of overrides, or a training script."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srl.config.keys import flat
from srl.config.yaml12 import parse
from srl.errors import UserError, parsing
from srl.train.importing.key_table import SEARCH_R1, SEARCH_R1_ONLY, VERL, defaults_of
from srl.train.importing.script import UNREAD, read_script

MAX_BYTES = 2**18
"""The largest file that is read."""

_BARE = frozenset(key for key in SEARCH_R1_ONLY if "." not in key)
_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w./@-]*)(?:=(.*))?", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(\d+)|[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None, "": None}
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MAX_REFERENCES = 10
"""References of one value, those behind them too; a circle has no end."""
_MAX_VALUE = 2**14


@dataclass
class Source:
    """The settings of the file `name` by their dotted names, references resolved.

    `program` is what the file's command runs (empty without a command). `added` are the keys that a `+` adds
    to verl's own. `undefined` are the keys left out, each with the reference that leads nowhere. `notes` are
    sentences about what was not read.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    program: str = ""
    added: set[str] = field(default_factory=set)
    undefined: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def dialect(self) -> str:
        is_search_r1 = self.program == "main_ppo_format" or SEARCH_R1_ONLY & self.settings.keys()
        return SEARCH_R1 if is_search_r1 else VERL


def read_source(path: Path, given: Mapping[str, str]) -> Source:
    """Read the file at `path`; `given` are values of variables. Raises UserError in one line."""
    with parsing(path):
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} has more than {MAX_BYTES:,} bytes, too many for a configuration")
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    if not text.strip() or "\0" in text:
        raise UserError(
            f"{path} is empty or not text; expected verl's configuration, or a script that runs it"
        )
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    source = _of_yaml(text, path) if is_yaml else _of_script(text, path, given)
    known = {**defaults_of(source.dialect), **source.settings}
    for key, value in list(source.settings.items()):
        if UNREAD.search(str(value)):
            continue  # a shell would have put its part in first
        try:
            source.settings[key] = resolved(value, key, known, given)
        except LookupError as error:
            source.undefined[key] = str(error.args[0])
            del source.settings[key]
    return source


def _of_yaml(text: str, path: Path) -> Source:
    tree = parse(text, str(path))
    if isinstance(tree, list):
        return _of_overrides([str(override) for override in tree], path)
    if not isinstance(tree, Mapping):
        raise UserError(f"{path}: expected sections with keys under them, or a list of overrides")
    if "format" in tree:
        raise UserError(f"{path} is a configuration of srl's own", hint=f"srl train --config {path}")
    source = Source(path.name, _flat({key: tree[key] for key in tree if key not in ("defaults", "hydra")}))
    bases = tree.get("defaults")
    unread = [str(base) for base in bases if base != "_self_"] if isinstance(bases, list) else []
    if unread:
        source.notes.append(f"the bases of the file are not read: {', '.join(unread)}")
    return source


def _of_script(text: str, path: Path, given: Mapping[str, str]) -> Source:
    script = read_script(text, str(path), given, _BARE)
    options = [word for word in script.words if word.startswith("-")]
    source = _of_overrides([word for word in script.words if not word.startswith("-")], path)
    source.program = script.program
    if options:
        source.notes.append(
            f"options are not read: {' '.join(options)}; what only their files set is verl's default"
        )
    if script.behind:
        source.notes.append(
            f"below the training command, and not part of it for a shell: {', '.join(script.behind)}"
        )
    return source


def _of_overrides(words: Iterable[str], path: Path) -> Source:
    source = Source(path.name)
    for word in words:
        override = _OVERRIDE.fullmatch(word)
        if override is None or (override[3] is None) != (override[1] == "~"):
            raise UserError(f"{path}: expected KEY=VALUE, found {word!r:.60}")
        settings = _flat({override[2]: read_value(override[3] or "", f"{path}: {word[:60]}")})
        source.settings |= settings
        source.added |= settings.keys() if "+" in override[1] else set()
    return source


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, without `???` (Hydra's mark for a missing value) and classes."""
    settings = ((".".join(path), value) for path, value in flat(tree))
    return {key: value for key, value in settings if value != "???" and not key.endswith("_target_")}


def read_value(text: str, name: str = "value") -> Any:
    """A value of Hydra's: true, false, null, a number, text, quoted text, or a list of these.

    Raises UserError with `name`.
    """
    text = text.strip()
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if number := _NUMBER.fullmatch(text):
        return int(text) if number[1] else float(text)
    if text[0] not in "[{'\"":
        return text
    value = parse(text, name)
    if any(isinstance(part, dict) and part for part in [value, *(value if isinstance(value, list) else [])]):
        raise UserError(f"{name}: a mapping is not read", hint="set each of its keys: NAME.KEY=VALUE")
    return value


def resolved(value: Any, key: str, known: Mapping[str, Any], given: Mapping[str, str]) -> Any:
    """The value of `key` with `${a.b}`, `${oc.select:a.b,otherwise}` and `${oc.env:NAME,otherwise}` put in.

    References lead to settings in `known` and variables in `given`. Raises LookupError with one that leads
    nowhere, or in a circle.
    """
    if isinstance(value, list):
        return [resolved(part, key, known, given) for part in value]
    for _ in range(_MAX_REFERENCES):
        reference = _REFERENCE.search(value) if isinstance(value, str) and len(value) < _MAX_VALUE else None
        if reference is None:
            break
        held = _referred(reference, key, known, given)
        before, after = value[: reference.start()], value[reference.end() :]
        value = held if not before + after else f"{before}{'' if held is None else held}{after}"
    if isinstance(value, str) and (reference := _REFERENCE.search(value)):
        raise LookupError(reference[0][:60])
    return value


def _referred(reference: re.Match[str], key: str, known: Mapping[str, Any], given: Mapping[str, str]) -> Any:
    function, _, argument = reference[1].strip().rpartition(":")
    name, has_default, default = (part.strip() for part in argument.partition(","))
    if function == "oc.env" and name in given:
        return given[name]
    if function in ("", "oc.select"):
        bare = name.lstrip(".")
        if up := len(name) - len(bare):  # leading dots count sections up from that of `key`
            name = ".".join([*key.split(".")[:-up], bare])
        if name in known:
            return known[name]
    if function in ("oc.env", "oc.select") and has_default:
        return read_value(default)
    raise LookupError(reference[0][:60])
