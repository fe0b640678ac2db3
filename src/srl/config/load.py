"""Reads the configuration of a run from its layers; each value keeps its origin.

Precedence: defaults < the algorithm's defaults < preset < file < flags < `--set`. A preset or file may extend
another. Its `per_algorithm` holds values for one algorithm, which override its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from srl.config.cross_checks import algorithm_plugin, check_plugins, check_training, cross_check
from srl.config.keys import Config, KeyPath, flat, keys, plain
from srl.config.paths import located
from srl.config.sections import one_or_many
from srl.config.settings import Setting, Values, build, defaults, flatten, put, reveal
from srl.config.unread import Backend, Kind, kind_of, unread, unread_lines
from srl.config.yaml12 import Lined, dump, parse
from srl.errors import UserError, nearest, parsing
from srl.files import FORMAT, atomic_file, check_format

SAVED = "config.yaml"
PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT_PRESET = "tiny"
_ABSENT: Any = object()
CHANGEABLE = tuple(key.name for key in keys() if key.facts.resumes)
"""The keys that a resumed run may change: memory, speed, search servers, checkpoints; none decides what is
learned."""


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
    *,
    trains: bool = True,
) -> Resolved:
    """The configuration of a run, validated and cross-checked.

    `algo` is an algorithm, or one of the kinds of runs `sft` and `rft`, which leave the algorithm of the
    layers. What such a run does not read of what was typed, here or in `file`, is among the warnings.
    `flags` maps dotted keys to values from the command line; None means not given. `sets` are `a.b=value`
    with the value in YAML. A file with `extends:` extends that instead of `preset`. Without `trains` it may
    be what no training run can do. Raises UserError that names key, value, expectation and origin.
    """
    kind = kind_of(algo)
    typed = _typed(algo if kind == "rl" else None, flags or {}, sets)
    layers = read_layers(preset, Path(file) if file else None)
    label = Path(file).stem if file else preset or "defaults"
    return resolve(layers, typed, label, kind, backend, trains=trains)


def resolve(
    layers: Sequence[Layer], typed: Sequence[Setting] = (), preset: str = DEFAULT_PRESET,
    kind: Kind = "rl", backend: Backend = "local", *, trains: bool = True,
) -> Resolved:  # fmt: skip
    """The configuration of layers, lowest precedence first, and of `typed`, what the command line says."""
    typed = list(typed)
    from_layers = [setting for layer in layers for setting in layer.settings] + typed
    _look_for_plugins(from_layers, Path.cwd())
    name = _algorithm_name(from_layers)
    plugin = algorithm_plugin(name)
    settings = list(flatten(plugin.defaults, lambda path: f"algorithm {name}"))
    settings += [setting for layer in layers for setting in layer.for_algorithm(name, plugin.name)] + typed
    values = defaults()
    for setting in settings:
        put(values, setting)
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
    warnings = list(doubtful if kind == "rl" else [])
    config = build(values)
    own = [setting for layer in layers if layer.is_typed for setting in layer.settings]
    warnings += unread_lines(unread(config, [setting.key for setting in own + typed], kind, backend, plugin))
    return Resolved(config, _origins(values), tuple(warnings), preset)


def load_saved(path: Path | str) -> Config:
    """The configuration that was saved with a run; `path` is the run's directory or the file itself."""
    path = Path(path)
    file = path / SAVED if path.is_dir() else path
    layer = read_layer(file, str(file))
    if not layer.settings:
        raise UserError(f"{file} is empty; restore it, or start a new run")
    values = defaults()
    for setting in layer.settings:
        put(values, setting)
    _look_for_plugins(layer.settings)
    return build(values)


def with_changes(
    config: Config, sets: Sequence[str], kind: Kind = "rl", backend: Backend = "local"
) -> tuple[Config, list[str]]:
    """The configuration of a resumed run with `sets` (`a.b=value`, the value in YAML), and warnings of those
    that it does not read.

    Raises UserError for a key that is not one of `CHANGEABLE`, and for values that contradict others.
    """
    values = {path: (value, "the run") for path, value in flat(config.model_dump())}
    typed = _typed(None, {}, sets)
    for setting in typed:
        if (key := setting.key) not in CHANGEABLE:
            raise UserError(
                f"--set {key}: a resumed run keeps its settings, but for memory, speed, search servers and "
                f"checkpoints ({', '.join(CHANGEABLE)}); leave it out, or start a new run"
            )
        if key == "search.url" and config.search.url is None:
            raise UserError(
                f"--set {key}: the run searches an index in its own process, and a resumed run cannot change "
                "to a server; leave it out, or start a new run"
            )
        put(values, setting)
    changed, plugin = build(values), algorithm_plugin(config.algorithm.name)
    cross_check(changed, _origins(values), plugin)
    void = unread(changed, [setting.key for setting in typed], kind, backend, plugin)
    return changed, unread_lines(void)


def typed_keys(flags: Mapping[str, object], sets: Sequence[str]) -> list[str]:
    """The keys that `flags` and `sets` set, as `load_config` reads them."""
    return [setting.key for setting in _typed(None, flags, sets)]


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


def _typed(algo: str | None, flags: Mapping[str, object], sets: Sequence[str]) -> list[Setting]:
    """Settings of the command line: `--algo`, then the other flags, then `--set`."""
    values = {key: _from_flag(value) for key, value in flags.items() if value is not None}
    settings = list(flatten(values, lambda path: "command line"))
    if algo is not None:
        settings.insert(0, Setting(("algorithm", "name"), algo, "--algo"))
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value, as in --set actor.optim.lr=1e-6")
        tree = {key.strip(): parse(value, f"--set {text}")}
        settings += flatten(tree, lambda path: "--set")
    return settings


def _from_flag(value: object) -> object:
    if isinstance(value, PathLike):
        return fspath(value)
    return [_from_flag(element) for element in value] if isinstance(value, list | tuple) else value


def _look_for_plugins(settings: Sequence[Setting], *directories: Path) -> None:
    """Find `module:Class` plugins in the directories of `trainer.plugin_path`, then in `directories`."""
    from srl.plugins.import_path import look_in

    plugin_paths = [setting.value for setting in settings if setting.path == ("trainer", "plugin_path")]
    saved = one_or_many(plugin_paths[-1]) if plugin_paths else None
    names = [(setting.path, setting.value) for setting in settings]
    look_in(*(saved if isinstance(saved, tuple) else ()), *directories, names=names)


def _algorithm_name(settings: Sequence[Setting]) -> str:
    choices = [setting for setting in settings if setting.path == ("algorithm", "name")]
    if not choices:
        return Config().algorithm.name
    if not isinstance(choices[-1].value, str):
        shown = reveal(choices[-1].value)
        raise UserError(
            f"{choices[-1].origin}: algorithm.name is {shown}: expected text", key="algorithm.name"
        )
    return choices[-1].value


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
    sections = dict(tree or {})
    is_typed = "format" not in sections and not origin.startswith("preset ")
    if "format" in sections:
        check_format(origin, sections.pop("format"))
    extends = sections.pop("extends", _ABSENT)
    if extends is not _ABSENT and not isinstance(extends, str | None):
        raise UserError(f"{origin}: extends is {extends!r}, expected the name of one preset or file")
    overlays = {}
    for name, overlay in _mapping(sections.pop("per_algorithm", None), "per_algorithm", origin).items():
        keys_of_it = _mapping(overlay, f"per_algorithm.{name}", origin)
        overlays[name] = list(flatten(keys_of_it, _origin_in(tree, origin, ("per_algorithm", name))))
    settings = list(flatten(sections, _origin_in(tree, origin)))
    says_extends = extends is not _ABSENT
    return Layer(settings, overlays, extends if says_extends else None, says_extends, is_typed)


def _mapping(value: Any, key: str, origin: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise UserError(f"{origin}: {key} is {reveal(value)}, expected keys under it")
    return value or {}


def _origin_in(tree: Lined | None, origin: str, base: KeyPath = ()) -> Callable[[KeyPath], str]:
    """Function from a key to its origin in a parsed file: a preset's name, or file and line."""

    def of(path: KeyPath) -> str:
        if origin.startswith("preset "):
            return f"{origin} ({base[1]})" if base else origin
        line, node = 0, tree
        for part in base + path:
            if not isinstance(node, Lined) or part not in node:
                break
            line, node = node.lines[part], node[part]
        return f"{origin}:{line}" if line else origin

    return of
