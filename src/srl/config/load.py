"""Reads the configuration of a run from its layers; each value keeps its origin.

Precedence: defaults < the algorithm's defaults < preset < file < flags < `--set`. A preset or file may extend
another. Its `per_algorithm` holds values for one algorithm, which override its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from srl.config.cross_checks import algorithm_plugin, check_plugins, check_training, cross_check
from srl.config.keys import Config, KeyPath, entry_of, flat, keys, plain, split_key
from srl.config.paths import located
from srl.config.sections import PluginSection, Takes, one_or_many
from srl.config.unread import Backend, Kind, kind_of, unread_lines
from srl.config.yaml12 import Lined, dump, parse
from srl.errors import UserError, expected, nearest, parsing
from srl.files import FORMAT, atomic_file, check_format

SAVED = "config.yaml"
PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT_PRESET = "tiny"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration with the origin of each value, and warnings about settings that are probably mistakes.

    `preset` is the name that the run gets: the preset, or the file's name without its suffix.
    """

    config: Config
    origins: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    preset: str = DEFAULT_PRESET


def load_config(
    preset: str | None = DEFAULT_PRESET,
    file: Path | str | None = None,
    algo: str | None = None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
    backend: Backend = "local",
) -> Resolved:
    """The configuration of a run, validated and cross-checked.

    `algo` is an algorithm, or one of the kinds of runs `sft` and `rft`, which leave the algorithm of the
    layers. What such a run does not read of what was typed, here or in `file`, is among the warnings.
    `flags` maps dotted keys to values from the command line; None means not given. `sets` are `a.b=value`
    with the value in YAML. A file with `extends:` extends that instead of `preset`. Raises UserError that
    names key, value, expectation and origin.
    """
    kind = kind_of(algo)
    typed = typed_settings(algo if kind == "rl" else None, flags or {}, sets)
    layers = read_layers(preset, Path(file) if file else None)
    label = Path(file).stem if file else preset or "defaults"
    return resolve(layers, typed, label, kind, backend)


def resolve(
    layers: Sequence[Layer], typed: Sequence[Setting] = (), preset: str = DEFAULT_PRESET,
    kind: Kind = "rl", backend: Backend = "local", *, trains: bool = True,
) -> Resolved:  # fmt: skip
    """The configuration of layers, lowest precedence first, and of `typed`, what the command line says.
    Without `trains` it may be what no training run can do."""
    below = [setting for layer in layers for setting in layer.settings]
    _look_for_plugins([*below, *typed], Path.cwd())
    named = [each for each in (*below, *typed) if each.path == ("algorithm", "name")][-1:]
    name, origin = Config().algorithm.name, "default"
    for setting in named:
        name, origin = setting.value if isinstance(setting.value, str) else name, setting.origin
    try:
        plugin = algorithm_plugin(name)
    except UserError as error:
        raise UserError(f"{origin}: {error}", key="algorithm.name") from error
    values = defaults()
    put(values, flatten(plugin.defaults, f"algorithm {name}"))
    for layer in layers:
        put(values, layer.for_algorithm(name, plugin.name))
    put(values, typed)
    config = build(values)
    if config.algorithm.name != name:
        origin = values["algorithm", "name"][1]
        raise UserError(f"{origin}: per_algorithm cannot change algorithm.name; use --algo {name}")
    origins = _origins(values)
    for path, value in check_plugins(config, origins).items():
        if not any(path[:depth] in values for depth in range(1, len(path))):
            values.setdefault(path, (value, "default"))
    doubtful = cross_check(config, origins, plugin)
    if trains:
        check_training(config, kind, backend, origins)
    config = build(values)
    own = [setting for layer in layers if layer.is_typed for setting in layer.settings]
    warnings = doubtful if kind == "rl" else []
    warnings += unread_lines(config, [each.key for each in (*own, *typed)], kind, backend)
    return Resolved(config, _origins(values), tuple(warnings), preset)


def load_saved(path: Path | str) -> Config:
    """The configuration that was saved with a run; `path` is the run's directory or the file itself."""
    path = Path(path)
    file = path / SAVED if path.is_dir() else path
    layer = read_layer(file, str(file))
    if not layer.settings:
        raise UserError(f"{file} is empty; restore it, or start a new run")
    values = defaults()
    put(values, layer.settings)
    _look_for_plugins(layer.settings)
    return build(values)


def with_changes(
    config: Config, sets: Sequence[str], kind: Kind = "rl", backend: Backend = "local"
) -> tuple[Config, list[str]]:
    """`config` with `sets` (`a.b=value`, the value in YAML), and warnings of those that such a run does not
    read. Raises UserError for values that contradict others."""
    values = {path: (value, "the run") for path, value in flat(config.model_dump())}
    put(values, typed := typed_settings(None, {}, sets))
    changed = build(values)
    cross_check(changed, _origins(values), algorithm_plugin(config.algorithm.name))
    return changed, unread_lines(changed, [each.key for each in typed], kind, backend)


def save_config(directory: Path | str, config: Config) -> None:
    """Write `config.yaml` into a directory, atomically, with absolute paths."""
    with atomic_file(Path(directory) / SAVED) as out:
        out.write(to_yaml(located(config)))


def to_yaml(config: Config) -> str:
    """The configuration as YAML; `load_config(file=…)` and `load_saved` read back the same values."""
    return dump({"format": FORMAT, "extends": None, **plain(config.model_dump())})


def describe(resolved: Resolved) -> list[tuple[str, Any, str]]:
    """`(key, value, origin)` of every value, in the order of the documentation."""
    values = {".".join(path): plain(value) for path, value in flat(resolved.config.model_dump())}
    return [(key, value, resolved.origins[key]) for key, value in values.items()]


def _origins(values: Values) -> dict[str, str]:
    return {".".join(path): origin for path, (_, origin) in values.items()}


def typed_settings(algo: str | None, flags: Mapping[str, object], sets: Sequence[str]) -> list[Setting]:
    """Settings of the command line: `--algo`, then the other flags, then `--set`."""
    values = {key: _from_flag(value) for key, value in flags.items() if value is not None}
    settings = list(flatten(values, "command line"))
    if algo is not None:
        settings.insert(0, Setting(("algorithm", "name"), algo, "--algo"))
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value, as in --set actor.optim.lr=1e-6")
        settings += flatten({key.strip(): plain(parse(value, f"--set {text}"))}, "--set")
    return settings


def _from_flag(value: object) -> object:
    if isinstance(value, PathLike):
        return fspath(value)
    return [_from_flag(element) for element in value] if isinstance(value, list | tuple) else value


def _look_for_plugins(settings: Sequence[Setting], *directories: Path) -> None:
    """Find `module:Class` plugins in the directories of `trainer.plugin_path`, then in `directories`."""
    from srl.plugins.import_path import give_names, look_in

    give_names([(setting.path, setting.value) for setting in settings])
    plugin_paths = [setting.value for setting in settings if setting.path == ("trainer", "plugin_path")]
    saved = one_or_many(plugin_paths[-1]) if plugin_paths else None
    look_in(*(saved if isinstance(saved, tuple) else ()), *directories)


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one preset or file, without those it extends."""

    settings: list[Setting]
    per_algorithm: dict[str, list[Setting]] = field(default_factory=dict)
    extends: str | None = None
    says_extends: bool = False
    is_typed: bool = False
    """Whether the user wrote it: neither a preset nor what `srl` saved, which has a format."""

    def for_algorithm(self, *names: str) -> list[Setting]:
        """The settings, and those of the first of these names of an algorithm that has any."""
        return self.settings + next(filter(None, map(self.per_algorithm.get, names)), [])


def preset_names() -> list[str]:
    """The presets that come with the package, the default first."""
    return sorted(
        (path.stem for path in PRESETS.glob("*.yaml")), key=lambda name: (name != DEFAULT_PRESET, name)
    )


def read_layers(preset: str | None, file: Path | None) -> list[Layer]:
    """The presets and files behind `preset` and `file`, lowest precedence first."""
    if file is None:
        return _chain(preset, None)
    layer = read_layer(file, str(file))
    if not layer.says_extends:
        return [*_chain(preset, None), layer]
    if preset not in (None, DEFAULT_PRESET, layer.extends):
        raise UserError(f"{file} extends {layer.extends!r}: leave out the preset {preset!r}, or that line")
    return [*_chain(layer.extends, file), layer]


def _chain(name: str | None, above: Path | None) -> list[Layer]:
    """The preset or file `name` and all that it extends, lowest first; `above` is the one that extends it."""
    layers: list[Layer] = []
    chain = [os.path.realpath(above)] if above else []
    while name is not None:
        path, origin = _locate(name, above)
        chain.append(os.path.realpath(path))
        if chain[-1] in chain[:-1]:
            raise UserError(f"{origin} extends itself: {' → '.join(Path(file).stem for file in chain)}")
        layer = read_layer(path, origin)
        layers.insert(0, layer)
        name, above = layer.extends, path
    return layers


def _locate(name: str, above: Path | None) -> tuple[Path, str]:
    """Path and origin of `name`: a preset, or a file in the same directory as `above`."""
    presets = preset_names()
    if name in presets:
        return PRESETS / f"{name}.yaml", f"preset {name}"
    if above and name.endswith((".yaml", ".yml")):
        return above.parent / name, str(above.parent / name)
    where = f"{above}: " if above else ""
    raise UserError(f"{where}no preset {name!r}: there are {', '.join(presets)}{nearest(name, presets)}")


def read_layer(path: Path, origin: str) -> Layer:
    """The settings in the file at `path`; messages call it `origin`."""
    with parsing(path):
        text = path.read_text(encoding="utf-8")
    tree = parse(text, origin)
    if not isinstance(tree, Lined | None):
        raise UserError(f"{origin}: expected sections with keys under them, found {type(tree).__name__}")
    sections: dict[str, Any] = tree or {}
    is_preset = origin.startswith("preset ")
    is_typed = "format" not in sections and not is_preset
    if "format" in sections:
        check_format(origin, sections.pop("format"))
    says_extends, extends = "extends" in sections, sections.pop("extends", None)
    if not isinstance(extends, str | None):
        raise UserError(f"{origin}: extends is {extends!r}, expected the name of one preset or file")
    overlays = {}
    for name, overlay in _mapping(sections.pop("per_algorithm", None), "per_algorithm", origin).items():
        keys_of_it = _mapping(overlay, f"per_algorithm.{name}", origin)
        # A preset's values have its name as their origin, a file's also the line.
        keys_of_it, where = (plain(keys_of_it), f"{origin} ({name})") if is_preset else (keys_of_it, origin)
        overlays[name] = list(flatten(keys_of_it, where))
    settings = list(flatten(plain(sections) if is_preset else sections, origin))
    return Layer(settings, overlays, extends, says_extends, is_typed)


def _mapping(value: Any, key: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise UserError(f"{origin}: {key} is {reveal(value)}, expected keys under it")
    return value or {}


# Settings


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


Values = dict[KeyPath, tuple[Any, str]]
"""Every value with its origin, by key."""


def flatten(tree: Mapping[str, Any], origin: str, base: KeyPath = ()) -> Iterator[Setting]:
    """The settings in a nested mapping; a dotted key means the same as nested ones. Where the mapping knows
    its lines, they are added to `origin`."""
    for name, value in tree.items():
        path = split_key(name, base)
        entry, where = entry_of(path), f"{origin}:{tree.lines[name]}" if isinstance(tree, Lined) else origin
        if isinstance(value, Mapping) and value and not (entry and entry.is_replaced):
            yield from flatten(value, origin, path)
        elif entry and entry.is_section and not isinstance(value, Mapping | None):
            key = ".".join(path)
            raise UserError(f"{where}: {key} is {reveal(value)}: expected keys under it", key=key)
        elif value or isinstance(value, int | float) or not _has_keys(path):
            yield Setting(path, value, where)


def _has_keys(path: KeyPath) -> bool:
    """Whether `path` is a section, or that of a plugin's options: where it is empty, nothing is set."""
    entry, above = entry_of(path), getattr(Config(), path[0], None)
    return entry.is_section if entry else len(path) == 2 and isinstance(above, PluginSection)


def defaults() -> Values:
    """Every key with its default."""
    return {path: (value, "default") for path, value in flat(Config().model_dump())}


def put(values: Values, settings: Iterable[Setting]) -> None:
    """Set values, one after the other: each replaces those below its key, and a mapping above it that was set
    as a whole."""
    for setting in settings:
        path = setting.path
        for key in [key for key in values if key[: len(path)] == path or path[: len(key)] == key]:
            del values[key]
        if isinstance(setting.value, Mapping) and setting.value:
            values |= {below: (value, setting.origin) for below, value in flat(setting.value, path)}
        else:
            values[path] = (setting.value, setting.origin)


def build(values: Values) -> Config:
    """The configuration made of `values`. Raises UserError for the first unknown key or invalid value."""
    tree: dict[str, Any] = {}
    for path, (value, _) in values.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        first, *_ = error.errors(include_url=False)
        location = tuple(str(part) for part in first["loc"])
        below = [path for path in values if path[: len(location)] == location]
        if first["type"] == "extra_forbidden" or (len(location) == 2 and entry_of(location) is None):
            key, (_, origin) = ".".join(below[-1]), values[below[-1]]
            raise UserError(f"{origin}: no key {key!r}", key=key, hint=_meant(below[-1])) from error
        path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in values), location)
        value, origin = values.get(path, (first["input"], values[below[-1]][1] if below else "default"))
        if location[-1] == "[key]":  # of a mapping, whose keys are names
            path, value = location[:-2], location[-2]
        key, marks = ".".join(path), entry.field.metadata if (entry := entry_of(path)) else []
        is_secret = path[-1] == "key_variable"  # where the key itself may be given by mistake
        shown = "a text that is not shown" if is_secret else reveal(value)
        why = next((f"expected {mark.words}" for mark in marks if isinstance(mark, Takes)), expected(first))
        raise UserError(f"{origin}: {key} is {shown}: {why}", key=key) from error


def _meant(path: KeyPath) -> str:
    """The hint for a misspelt key: those with its last part, of its own section if any; else one alike."""
    every = [key.name for key in keys() if not ".".join(path).startswith(f"{key.name}.")]
    same = [name for name in every if name.rpartition(".")[2] == path[-1]]
    inside = [name for name in same if name.split(".")[0] == path[0]]
    near = (inside or same or get_close_matches(".".join(path), every, n=1))[:3]
    names = " or ".join(map(repr, near))
    return f"did you mean {names}?" if near else "`srl train --print-config` lists all keys"


def reveal(value: Any) -> str:
    """A value for a message, truncated to 80 characters."""
    text = repr(plain(value))
    return text if len(text) <= 80 else f"{text[:79]}…"
