"""One configuration from many layers, each value with its origin.

Defaults < the algorithm's defaults < preset < file < flags < `--set`. A preset or a file may extend
another, and may hold values for one algorithm only (`per_algorithm`), which lie right above its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from srl.config.checks import algorithm_plugin, check_plugins, cross_check, plugin_options
from srl.config.paths import portable, restored, workspace_of
from srl.config.schema import Config, Path, flat, keys, place, plain, takes
from srl.config.sections import one_or_many
from srl.config.yaml12 import Lined, dump, parse
from srl.errors import UserError, nearest
from srl.files import FORMAT, atomic_file, check_format
from srl.renamed import KEYS, renamed

SAVED = "config.yaml"
PRESETS = FilePath(__file__).parent.parent / "presets"
DEFAULT_PRESET = "tiny"
_ABSENT: Any = object()

Values = dict[Path, tuple[Any, str]]
"""Every value with its origin."""


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
    file: FilePath | str | None = None,
    algo: str | None = None,
    flags: Mapping[str, object] | None = None,
    sets: Sequence[str] = (),
) -> Resolved:
    """The configuration of a run, validated and cross-checked.

    `flags` maps dotted keys to what the command line gave; None there means not given. `sets` are
    `a.b=value` with the value in YAML. A file that says `extends:` stands on that instead of `preset`.
    Raises UserError naming key, value, expectation and origin.
    """
    sources = bodies(preset, FilePath(file) if file else None)
    typed = _typed(algo, flags or {}, sets)
    given = [entry for body in sources for entry in body.entries] + typed
    _look_for_plugins(given, FilePath.cwd())
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
    label = FilePath(file).stem if file else preset or "defaults"
    return Resolved(build(state), _origins(state), tuple(warnings), label)


def load_saved(path: FilePath | str) -> Config:
    """The configuration that was saved with a run; `path` is the run's directory or the file itself."""
    path = FilePath(path)
    file = path / SAVED if path.is_dir() else path
    body = read_body(file, str(file))
    if not body.entries:
        raise UserError(f"{file} is empty; restore it, or start a new run")
    state = defaults()
    for entry in body.entries:
        put(state, entry)
    _look_for_plugins(body.entries)
    return build(state)


def save_config(directory: FilePath | str, config: Config) -> None:
    """Write `config.yaml` into a directory, whole or not at all; paths are as `portable` has them."""
    file = FilePath(directory) / SAVED
    with atomic_file(file) as out:
        out.write(to_yaml(portable(config, workspace_of(file))))


def to_yaml(config: Config) -> str:
    """Every value as YAML that `load_config(file=…)` and `load_saved` read back as the same."""
    return dump({"format": FORMAT, "extends": None, **plain(config.model_dump())})


def describe(resolved: Resolved) -> list[tuple[str, Any, str]]:
    """`(key, value, origin)` of every value, in the order of the documentation."""
    values = {".".join(path): plain(value) for path, value in flat(resolved.config.model_dump())}
    return [(key, value, resolved.origins[key]) for key, value in values.items()]


def _old_keys(entries: Sequence[Setting]) -> list[str]:
    """A warning for each key that was given by an old name."""
    found = {entry.old_key: entry.origin for entry in entries if entry.old_key}
    return [f"{origin}: {renamed(old, KEYS[old])}" for old, origin in found.items()]


def _origins(state: Values) -> dict[str, str]:
    return {".".join(path): origin for path, (_, origin) in state.items()}


def _typed(algo: str | None, flags: Mapping[str, object], sets: Sequence[str]) -> list[Setting]:
    """What was typed: `--algo`, then the other flags, then `--set`."""
    given = {key: _from_flag(value) for key, value in flags.items() if value is not None}
    entries = list(flatten(given, lambda path: "command line"))
    if algo is not None:
        entries.insert(0, Setting(("algorithm", "name"), algo, "--algo"))
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


def _look_for_plugins(entries: Sequence[Setting], *directories: FilePath) -> None:
    """Find `module:Class` plugins in the directories of `trainer.plugin_path`, then in `directories`."""
    from srl.plugins.import_path import look_in

    named = [entry.value for entry in entries if entry.path == ("trainer", "plugin_path")]
    saved = one_or_many(named[-1]) if named else None
    look_in(*(saved if isinstance(saved, tuple) else ()), *directories)


def _algorithm_name(entries: Sequence[Setting]) -> str:
    named = [entry for entry in entries if entry.path == ("algorithm", "name")]
    if not named:
        return Config().algorithm.name
    if not isinstance(named[-1].value, str):
        raise UserError(wrong(named[-1].path, named[-1].value, named[-1].origin))
    return named[-1].value


@dataclass(frozen=True, slots=True)
class Body:
    """What one preset or file says itself; `extends` is the name it stands on."""

    entries: list[Setting]
    per_algorithm: dict[str, list[Setting]] = field(default_factory=dict)
    extends: str | None = None
    says_extends: bool = False

    def for_algorithm(self, name: str) -> list[Setting]:
        return self.entries + self.per_algorithm.get(name, [])


def preset_names() -> list[str]:
    """The presets that come with the package, the default first."""
    return sorted(
        (path.stem for path in PRESETS.glob("*.yaml")), key=lambda name: (name != DEFAULT_PRESET, name)
    )


def bodies(preset: str | None, file: FilePath | None) -> list[Body]:
    """The presets and files that make up `preset` and `file`, the lowest first."""
    if file is None:
        return _chain(preset, None)
    body = read_body(file, str(file))
    if not body.says_extends:
        return [*_chain(preset, None), body]
    if preset not in (None, DEFAULT_PRESET, body.extends):
        raise UserError(f"{file} extends {body.extends!r}: leave out the preset {preset!r}, or that line")
    return [*_chain(body.extends, file), body]


def _chain(name: str | None, above: FilePath | None) -> list[Body]:
    """The preset or file `name` and all that it extends, the lowest first; `above` is what names it."""
    found: list[Body] = []
    seen = [above] if above else []
    while name is not None:
        path, origin = _locate(name, above)
        if path in seen:
            raise UserError(f"{origin} extends itself: {' → '.join(item.stem for item in [*seen, path])}")
        seen.append(path)
        body = read_body(path, origin)
        found.insert(0, body)
        name, above = body.extends, path
    return found


def _locate(name: str, above: FilePath | None) -> tuple[FilePath, str]:
    """File and origin of `name`: a preset, or a file beside the one that extends it."""
    known = preset_names()
    if name in known:
        return PRESETS / f"{name}.yaml", f"preset {name}"
    if above and name.endswith((".yaml", ".yml")):
        return above.parent / name, str(above.parent / name)
    raise UserError(f"no preset {name!r}: there are {', '.join(known)}{nearest(name, known)}")


def read_body(path: FilePath, origin: str) -> Body:
    """What the file at `path` says; `origin` is how it is called in messages."""
    tree = parse(_text(path), origin)
    if not isinstance(tree, Lined | None):
        raise UserError(f"{origin}: expected sections with keys under them, found {type(tree).__name__}")
    rest = dict(tree or {})
    if "format" in rest:
        check_format(origin, rest.pop("format"))
    extends = rest.pop("extends", _ABSENT)
    if extends is not _ABSENT and not isinstance(extends, str | None):
        raise UserError(f"{origin}: extends is {extends!r}, expected the name of one preset or file")
    overlays = _overlays(rest.pop("per_algorithm", None), tree, origin)
    said = extends is not _ABSENT
    entries = list(flatten(rest, _origin_in(tree, origin)))
    if workspace := workspace_of(path):
        entries = [replace(item, value=restored(item.path, item.value, workspace)) for item in entries]
    return Body(entries, overlays, extends if said else None, said)


def _text(path: FilePath) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: expected text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise UserError(f"{path}: the configuration cannot be read: {error.strerror}") from error


def _overlays(tree: Any, whole: Lined | None, origin: str) -> dict[str, list[Setting]]:
    """The entries of each algorithm in `per_algorithm`."""
    overlays: dict[str, list[Setting]] = {}
    for name, body in _mapping(tree, "per_algorithm", origin).items():
        origins = _origin_in(whole, origin, ("per_algorithm", name))
        overlays[name] = list(flatten(_mapping(body, f"per_algorithm.{name}", origin), origins))
    return overlays


def _mapping(value: Any, key: str, origin: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{origin}: {key} is {reveal(value)}, expected keys under it")
    return value


def _origin_in(tree: Lined | None, origin: str, base: Path = ()) -> Callable[[Path], str]:
    """The origin of a path in a parsed file: presets by name, other files with the line."""

    def of(path: Path) -> str:
        if origin.startswith("preset "):
            return f"{origin} ({base[1]})" if base else origin
        line, node = 0, tree
        for part in base + path:
            if not isinstance(node, Lined) or part not in node:
                break
            line, node = node.lines[part], node[part]
        return f"{origin}:{line}" if line else origin

    return of


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a layer gives."""

    path: Path
    value: Any
    origin: str
    old_key: str = ""
    """Where the value was given by an old name of its key: that name."""


def defaults() -> Values:
    """Every key with its default."""
    return {path: (value, "default") for path, value in flat(Config().model_dump())}


def put(state: Values, entry: Setting) -> None:
    """Set one value; what lay below it or above it (a mapping set as a whole) is gone."""
    path = entry.path
    for other in [other for other in state if other[: len(path)] == path or path[: len(other)] == other]:
        del state[other]
    if isinstance(entry.value, Mapping) and entry.value:
        state |= {below: (value, entry.origin) for below, value in flat(entry.value, path)}
    else:
        state[path] = (entry.value, entry.origin)


def build(state: Values) -> Config:
    """The configuration that `state` makes. Raises UserError for the first value that does not fit."""
    tree: dict[str, Any] = {}
    for path, (value, _) in state.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(_first_wrong(error, state)) from error


def flatten(tree: Mapping[str, Any], origin: Callable[[Path], str], base: Path = ()) -> Iterator[Setting]:
    """The values in a nested mapping, one by one; dotted keys count as nested ones.

    Raises UserError for a key that does not exist and for a value where a section belongs.
    """
    for key, value in tree.items():
        given = split_key(key, base)
        path, old_key = _current(given)
        kind, field = place(path)
        is_plugin = kind == "free" and len(path) == 2 and field is None
        if kind == "unknown" or (is_plugin and not isinstance(value, Mapping | None)):
            raise UserError(f"{origin(given)}: no key {'.'.join(path)!r}{_suggestion(path)}")
        if isinstance(value, Mapping) and (kind == "section" or (kind == "free" and value)):
            yield from flatten(value, origin, given)
        elif kind == "section" and value is not None:
            raise UserError(f"{origin(given)}: {'.'.join(path)} is {reveal(value)}, expected keys under it")
        elif kind != "section" and not (is_plugin and value is None):
            yield Setting(path, value, origin(given), old_key)


def _current(given: Path) -> tuple[Path, str]:
    """The key by its name of today, and where `given` has an old one, that."""
    for old, new in KEYS.items():
        parts = tuple(old.split("."))
        if given[: len(parts)] == parts:
            return (*new.split("."), *given[len(parts) :]), old
    return given, ""


def split_key(key: str, base: Path = ()) -> Path:
    """The path of a dotted key below `base`; a plugin's `package.module:Class` stays one part.

    >>> split_key("reward.weights.my.rewards:Brevity")
    ('reward', 'weights', 'my.rewards:Brevity')
    """
    path = (*base, *key.split("."))
    colon = next((place for place, part in enumerate(path) if ":" in part), 0)
    start = 2 if path[:2] == ("reward", "weights") else 1
    if path[0] not in ("retriever", "reward", "algorithm") or colon <= start:
        return path
    return (*path[:start], ".".join(path[start : colon + 1]), *path[colon + 1 :])


def _suggestion(path: Path) -> str:
    """The nearest key: the same last part in the same section, a neighbour, the same last part, any."""
    known = [key.name for key in keys()]
    here = ".".join(path)
    same = [name for name in known if name.split(".")[-1] == path[-1]]
    for names in ([name for name in same if name.split(".")[0] == path[0]], same):
        if names:
            return f"; did you mean {' or '.join(map(repr, names[:3]))}?"
    neighbours = [name for name in known if name.split(".")[:-1] == list(path[:-1])]
    return nearest(here, neighbours) or nearest(here, known) or "; `srl train --print-config` lists all keys"


def _first_wrong(error: ValidationError, state: Values) -> str:
    """One line about the first value that does not fit."""
    first, *_ = error.errors(include_url=False)
    location = tuple(str(part) for part in first["loc"])
    path = next((location[:n] for n in range(len(location), 0, -1) if location[:n] in state), location)
    value, origin = state.get(path, (first["input"], "default"))
    return wrong(path, value, origin)


def reveal(value: Any) -> str:
    """A value as messages show it, cut where it is long."""
    text = repr(plain(value))
    return text if len(text) <= 80 else f"{text[:79]}…"


def wrong(path: Path, value: Any, origin: str) -> str:
    field = place(path)[1]
    inside_mapping = field is not None and place(path[:-1])[0] == "mapping"
    expected = "number" if inside_mapping else takes(field) if field else "something else"
    return f"{origin}: {'.'.join(path)} is {reveal(value)}, expected {expected}"
