"""One configuration from many layers, each value with its origin.

Defaults < the algorithm's defaults < preset < file < flags < `--set`. A preset or a file may extend
another, and may hold values for one algorithm only (`per_algorithm`), which lie right above its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from srl.config.base import one_or_many
from srl.config.checks import algorithm_plugin, check_plugins, cross_check, plugin_options
from srl.config.merge import Entry, State, build, defaults, flatten, put, wrong
from srl.config.paths import portable, workspace_of
from srl.config.schema import Config, flat, plain
from srl.config.sources import DEFAULT_PRESET, bodies, read_body
from srl.config.yamltext import dump, parse
from srl.errors import UserError
from srl.files import FORMAT, atomic_file
from srl.renamed import KEYS, renamed

SAVED = "config.yaml"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration, where each value comes from, and what is allowed but probably not meant.

    `preset` is what a run is named after: the preset, or the file's name without its ending.
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
) -> Resolved:
    """The configuration of a run, validated and cross-checked.

    `flags` maps dotted keys to what the command line gave; None there means not given. `sets` are
    `a.b=value` with the value in YAML. A file that says `extends:` stands on that instead of `preset`.
    Raises UserError naming key, value, expectation and origin.
    """
    sources = bodies(preset, Path(file) if file else None)
    typed = _typed(algo, flags or {}, sets)
    given = [entry for body in sources for entry in body.entries] + typed
    _look_for_plugins(given, Path.cwd())
    name = _algorithm_name(given)
    plugin = algorithm_plugin(name)
    entries = list(flatten(plugin.defaults, lambda path: f"algorithm {name}"))
    entries += [entry for body in sources for entry in body.for_algorithm(name)] + typed
    state = defaults()
    for entry in entries:
        put(state, entry)
    config = build(state)
    if config.algorithm.name != name:
        origin = state["algorithm", "name"][1]
        raise UserError(f"{origin}: per_algorithm cannot change algorithm.name; use --algo {name}")
    origins = _origins(state)
    check_plugins(config, origins)
    for path, value in plugin_options(config):
        if not any(path[:depth] in state for depth in range(1, len(path))):
            state.setdefault(path, (value, "default"))
    warnings = [*_old_keys(entries), *cross_check(config, origins, plugin)]
    label = Path(file).stem if file else preset or "defaults"
    return Resolved(build(state), _origins(state), tuple(warnings), label)


def load_saved(path: Path | str) -> Config:
    """The configuration that was saved with a run; `path` is the run's directory or the file itself."""
    path = Path(path)
    file = path / SAVED if path.is_dir() else path
    body = read_body(file, str(file))
    if not body.entries:
        raise UserError(f"{file} is empty; restore it, or start a new run")
    state = defaults()
    for entry in body.entries:
        put(state, entry)
    _look_for_plugins(body.entries)
    return build(state)


def save_config(directory: Path | str, config: Config) -> None:
    """Write `config.yaml` into a directory, whole or not at all; paths are as `portable` has them."""
    file = Path(directory) / SAVED
    with atomic_file(file) as out:
        out.write(to_yaml(portable(config, workspace_of(file))))


def to_yaml(config: Config) -> str:
    """Every value as YAML that `load_config(file=…)` and `load_saved` read back as the same."""
    return dump({"format": FORMAT, "extends": None, **plain(config.model_dump())})


def describe(resolved: Resolved) -> list[tuple[str, Any, str]]:
    """`(key, value, origin)` of every value, in the order of the documentation."""
    values = {".".join(path): plain(value) for path, value in flat(resolved.config.model_dump())}
    return [(key, value, resolved.origins[key]) for key, value in values.items()]


def _old_keys(entries: Sequence[Entry]) -> list[str]:
    """A warning for each key that was given by an old name."""
    found = {entry.old_key: entry.origin for entry in entries if entry.old_key}
    return [f"{origin}: {renamed(old, KEYS[old])}" for old, origin in found.items()]


def _origins(state: State) -> dict[str, str]:
    return {".".join(path): origin for path, (_, origin) in state.items()}


def _typed(algo: str | None, flags: Mapping[str, object], sets: Sequence[str]) -> list[Entry]:
    """What was typed: `--algo`, then the other flags, then `--set`."""
    given = {key: _from_flag(value) for key, value in flags.items() if value is not None}
    entries = list(flatten(given, lambda path: "command line"))
    if algo is not None:
        entries.insert(0, Entry(("algorithm", "name"), algo, "--algo"))
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value, as in --set actor.optim.lr=1e-6")
        tree = {key.strip(): parse(value, f"--set {text}")}
        entries += flatten(tree, lambda path: "--set")
    return entries


def _from_flag(value: object) -> object:
    if isinstance(value, PathLike):
        return fspath(value)
    return [_from_flag(item) for item in value] if isinstance(value, list | tuple) else value


def _look_for_plugins(entries: Sequence[Entry], *directories: Path) -> None:
    """Find `module:Class` plugins in the directories of `trainer.plugin_path`, then in `directories`."""
    from srl.plugins.import_path import look_in

    named = [entry.value for entry in entries if entry.path == ("trainer", "plugin_path")]
    saved = one_or_many(named[-1]) if named else None
    look_in(*(saved if isinstance(saved, tuple) else ()), *directories)


def _algorithm_name(entries: Sequence[Entry]) -> str:
    named = [entry for entry in entries if entry.path == ("algorithm", "name")]
    if not named:
        return Config().algorithm.name
    if not isinstance(named[-1].value, str):
        raise UserError(wrong(named[-1].path, named[-1].value, named[-1].origin))
    return named[-1].value
