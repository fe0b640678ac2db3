"""Converting the settings of a source to our configuration, with a report of what changed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from srl.config import load_config
from srl.config.keys import flat, plain
from srl.config.yaml12 import dump, parse
from srl.errors import UserError
from srl.files import FORMAT
from srl.train.importing.differences import Conversion, adjust
from srl.train.importing.hydra import nested, resolved
from srl.train.importing.key_table import (
    ESTIMATORS,
    KEY_TABLE,
    NO_DEFAULT,
    KeyMapping,
    mappings_of,
    verl_knows,
    why_replaced,
)
from srl.train.importing.source import Source, read_source

_PATHS = ("model.path", "model.tokenizer", "data.train_files", "data.val_files")
_OWN = {"extends": None, "sft.steps": 0}
"""Set in every imported file: no preset below it, and no fine-tuning before training."""

_KEPT = "kept below verl:, read only with --backend verl"
_SAME = "left out, same as verl's default"
_UNKNOWN = "ignored, unknown to srl and to verl 0.9.1"
_NAMED = 12
"""Up to this number, keys that equal verl's default are listed; more are only counted."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The configuration as YAML (`text`), and the report, one sentence a line."""

    text: str
    report: tuple[str, ...]


def import_file(path: Path | str, given: Mapping[str, str] | None = None) -> Imported:
    """Convert a file of verl's or Search-R1's to a configuration of ours, and check that it loads.

    `given` are values of shell variables. Raises UserError, in one line, for what cannot be converted.
    """
    try:
        return _imported(Path(path), given or {})
    except UserError as error:
        raise UserError(_one_line(str(error))) from error


def _imported(path: Path, given: Mapping[str, str]) -> Imported:
    source = read_source(path, given)
    conversion = Conversion(source, _mapped(source))
    adjust(conversion)
    said = [*conversion.notes, *_about_defaults(conversion), *_sort_others(conversion)]
    report = tuple(_one_line(sentence) for sentence in said)
    text = _header(source, report) + _yaml(_OWN | _written_keys(conversion))
    _check(text, source, path)
    return Imported(text, report)


def _one_line(text: str) -> str:
    """The text with every line break, of YAML's too, replaced by a space."""
    return " ".join(text.split())


def _mapped(source: Source) -> dict[str, Any]:
    """Our keys, with the values that the source sets or has by default."""
    ours: dict[str, Any] = {}
    for name in mappings_of(source.dialect):
        value = source.settings.get(name.theirs)
        if value is None:
            value = name.defaults[source.dialect]
        if value is not NO_DEFAULT:
            ours[name.ours] = _converted(name, value, source)
    return ours


def _converted(name: KeyMapping, value: Any, source: Source) -> Any:
    if name.ours in _PATHS:
        return [_at_home(item) for item in value] if isinstance(value, list) else _at_home(value)
    if name.values is ESTIMATORS and isinstance(value, str) and value.startswith("srl_"):
        return value.removeprefix("srl_")
    if isinstance(value, list | dict) or value not in name.values:
        if all(isinstance(known, str) for known in name.values) and name.values:
            raise UserError(f"{source.name}: {_no_such(name, value)}")
        return value
    return name.values[value]


def _no_such(name: KeyMapping, value: Any) -> str:
    """The error for a value without an equivalent."""
    if name.values is ESTIMATORS:
        return (
            f"{name.theirs}={value}: srl has no such estimator; it has {', '.join(_estimators())}; "
            "write another as a plugin: srl plugins new algorithm NAME"
        )
    known = ", ".join(map(str, name.values))
    return f"{name.theirs}={value}: srl has no equivalent; it has what verl calls {known}"


def _estimators() -> list[str]:
    from srl.plugins import manager

    return sorted({entry.name for entry in manager.installed("algorithm")})


def _at_home(value: Any) -> Any:
    """A path with `~` expanded, as verl does."""
    return str(Path(value).expanduser()) if isinstance(value, str) and value.startswith("~/") else value


def _written_keys(conversion: Conversion) -> dict[str, Any]:
    """Our keys, those of a critic only where the algorithm has one."""
    return {
        key: value
        for key, value in conversion.ours.items()
        if conversion.has_critic or not key.startswith("critic.")
    }


def _about_defaults(conversion: Conversion) -> list[str]:
    """One line with the defaults that the file now sets explicitly."""
    source, written = conversion.source, _written_keys(conversion)
    given = {name.ours for name in mappings_of(source.dialect) if name.theirs in source.settings}
    taken = [
        f"{name.theirs}={_written(name.defaults[source.dialect])}"
        for name in mappings_of(source.dialect)
        if name.defaults[source.dialect] is not NO_DEFAULT
        if name.ours in written and name.ours not in given
    ]
    return [f"defaults of {source.dialect} written out: {', '.join(taken)}"] if taken else []


def _sort_others(conversion: Conversion) -> list[str]:
    """Put keys that only verl has below `verl:`; report what became of each key outside the table."""
    source, usual = conversion.source, _verl_defaults(conversion)
    named = {name.theirs for name in mappings_of(source.dialect)} | conversion.used
    fates: dict[str, list[str]] = {}
    for key, value in source.settings.items():
        if key not in named:
            fate = _fate(key, value, usual, source.added)
            fates.setdefault(fate, []).append(key)
            if fate == _KEPT:
                conversion.ours[f"verl.{key}" if verl_knows(key) else f"verl.+{key}"] = value
    lines = [f"{fate}: {_listed(found, fate)}" for fate, found in sorted(fates.items())]
    return lines + [f"ignored, {wanted} is not defined: {key}" for key, wanted in source.undefined.items()]


def _fate(key: str, value: Any, usual: Mapping[str, Any], added: Collection[str]) -> str:
    """What becomes of a key that is not in the table."""
    if key in usual and usual[key] == value:
        return _SAME
    if reason := why_replaced(key):
        return f"dropped, {reason}"
    return _KEPT if verl_knows(key) or key in added else _UNKNOWN


def _listed(keys: Sequence[str], fate: str) -> str:
    return f"{len(keys)} keys" if fate == _SAME and len(keys) > _NAMED else ", ".join(keys)


def _verl_defaults(conversion: Conversion) -> dict[str, Any]:
    """verl's defaults under these settings, where verl is installed; empty without it."""
    found = _shipped("_megatron" if conversion.ours["cluster.strategy"] == "megatron" else "")
    return resolved(found, {**found, **conversion.source.settings}, {})[0]


@cache
def _shipped(engine: str) -> dict[str, Any]:
    """The default configuration in the verl package, references unresolved; empty without verl."""
    try:
        file = distribution("verl").locate_file(f"verl/trainer/config/_generated_ppo{engine}_trainer.yaml")
        tree = parse(Path(str(file)).read_text(encoding="utf-8"), "verl")
    except (PackageNotFoundError, OSError, UserError):
        return {}
    return {".".join(path): value for path, value in flat(tree)}


def _yaml(flat_keys: Mapping[str, Any]) -> str:
    try:
        return dump({"format": FORMAT, **nested({key: plain(value) for key, value in flat_keys.items()})})
    except ValueError as error:
        raise UserError(str(error)) from error


def _header(source: Source, report: tuple[str, ...]) -> str:
    lines = [_one_line(f"From {source.name}, a configuration of {source.dialect}'s."), *report]
    return "".join(f"# {line}\n" for line in lines) + "\n"


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _check(text: str, source: Source, path: Path | str) -> None:
    """Raise UserError, naming their key beside ours, unless the file loads."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imported.yaml"
        file.write_text(text, encoding="utf-8")
        try:
            load_config(file=file)
        except UserError as error:
            message = re.sub(rf"{re.escape(str(file))}(:\d+)?:? ?", "", str(error)).replace(" ()", "")
            theirs = [
                f"{name.theirs}={_written(source.settings[name.theirs])}"
                for name in KEY_TABLE
                if source.dialect in name.defaults and name.ours in message and name.theirs in source.settings
            ]
            said = f" ({', '.join(theirs)})" if theirs else ""
            raise UserError(f"{path}: {message}{said}") from error
