"""Which plugins are installed, and how one is loaded.

Plugins are found through the entry-point group `srl`. Listing imports only the modules that entry points
name; a factory and its options are imported when the plugin is used.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy

from srl.errors import SrlError, UserError, nearest
from srl.install import INSTALL_ALL
from srl.plugins import hookspecs
from srl.plugins.plugin import Plugin as Plugin
from srl.plugins.plugin import in_one_line as in_one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

GROUP = "srl"
KINDS = {kind: f"srl_{kind}s" for kind in ("retriever", "reward", "algorithm", "tool")}
"""Each kind of plugin and its hook."""
UNKNOWN = "unknown"
"""The kind of a plugin whose module failed to import."""


def installed(kind: str | None = None) -> list[Plugin]:
    """Everything registered, by kind and name; the plugins that failed to import come last."""
    if kind is not None and kind not in KINDS:
        raise UserError(
            f"no kind of plugin {kind!r}: there are {', '.join(KINDS)}{nearest(kind, list(KINDS))}"
        )
    return [entry for entry in _registry() if kind in (None, entry.kind)]


def find(kind: str, name: str) -> Plugin:
    """The only plugin of `kind` called `name`, or imported as `module:Class`.

    Raises UserError when there is none or more than one.
    """
    candidates = installed(kind)
    if is_import_path(name):
        from srl.plugins.import_path import imported

        return imported(kind, name)
    for entry in candidates:
        if entry.name == name:
            if entry.error:
                raise UserError(f"{entry}: {entry.error}")
            return entry
    names = [entry.name for entry in candidates]
    broken = [f"{entry.package} ({entry.error})" for entry in _registry() if entry.kind == UNKNOWN]
    also = f"; not importable: {', '.join(broken)}" if broken else ""
    is_ours = f"srl-search-{name}" in _own_packages() and all(entry.name != name for entry in _registry())
    hint = INSTALL_ALL if is_ours or not names else "srl plugins list"
    there_are = f"installed are {', '.join(names)}{nearest(name, names)}" if names else "none is installed"
    raise UserError(f"no {kind} {name!r}: {there_are}{also}", hint=f"type: {hint}")


def is_import_path(name: str) -> bool:
    """Whether a plugin's name is `module:Class`, and not that of an installed one."""
    return ":" in name


def options_model(kind: str, name: str) -> type[BaseModel] | None:
    """The pydantic model of a plugin's options, or None where it has none."""
    entry = find(kind, name)
    if entry.options is None:
        return None
    from pydantic import BaseModel

    model = _import(entry, entry.options)
    if not (isinstance(model, type) and issubclass(model, BaseModel)):
        raise UserError(f"{entry} has {model!r} for its options, expected a pydantic model")
    return model


def load(kind: str, name: str, options: Mapping[str, Any] | None = None) -> object:
    """The plugin object that the factory makes of `options`, once they are validated.

    Raises UserError for an unknown or ambiguous name, options that do not fit, a missing package.
    """
    from srl.plugins.options import validated

    entry, model = find(kind, name), options_model(kind, name)
    if model is None and options:
        raise UserError(f"{entry} takes no options; remove {', '.join(map(repr, options))}")
    plugin = _import(entry, entry.factory)
    if callable(plugin):
        arguments = () if model is None else (validated(f"{kind}.{name}", model, options or {}),)
        with named_errors(entry):
            plugin = plugin(*arguments)
    members = ("estimator", "needs_critic", "defaults")
    if kind == "algorithm" and not all(hasattr(plugin, member) for member in members):
        raise UserError(f"{entry} is not an srl.advantage.Algorithm, nor a function that returns one")
    return plugin


@contextmanager
def named_errors(entry: Plugin) -> Iterator[None]:
    """Around a call of a plugin's code: UserError for what it raises, with the plugin, the file and the line.

    An error in the plugins of this project stays what it is: a bug.
    """
    try:
        yield
    except SrlError:
        raise
    except Exception as error:
        if entry.package in _own_packages() and not isinstance(error, ImportError):
            raise
        raise UserError(f"{entry} raised {in_one_line(error)}") from error


def _import(entry: Plugin, target: Any) -> Any:
    """What `"module:attribute"` names; anything else is returned as it is."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    with named_errors(entry):
        imported = import_module(module)
    if not hasattr(imported, attribute):
        raise UserError(f"{entry} could not be loaded: {module} has no {attribute!r}")
    return getattr(imported, attribute)


@cache
def _own_packages() -> frozenset[str]:
    """The plugin packages that `srl-search` itself names in its extras."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return frozenset(re.split(r"[^\w.-]", line)[0] for line in requires("srl-search") or [])
    except PackageNotFoundError:
        return frozenset()


def forget() -> None:
    """Clear the cached list of plugins."""
    _registry.cache_clear()


@cache
def _registry() -> tuple[Plugin, ...]:
    """Every plugin imported and asked what it registers; a module that raises is kept with its error."""
    from importlib.metadata import entry_points

    hooks = pluggy.PluginManager(GROUP)
    hooks.add_hookspecs(hookspecs)
    working: list[Plugin] = []
    broken: list[Plugin] = []
    for point in entry_points(group=GROUP):
        package, version = (point.dist.name, point.dist.version) if point.dist else ("", "")
        try:
            working += _registrations(hooks, point.load(), package, version)
        except (Exception, SystemExit) as error:
            broken.append(Plugin(UNKNOWN, point.name, package, version, "", in_one_line(error)))
    packages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in working:
        packages[entry.kind, entry.name].append(entry.package)
    for place, entry in enumerate(working):
        if len(names := packages[entry.kind, entry.name]) > 1:
            why = f"registered by {' and '.join(names)}; uninstall one of them"
            working[place] = replace(entry, error=why)
    working.sort(key=lambda entry: (list(KINDS).index(entry.kind), entry.name, entry.package))
    return (*working, *broken)


def _registrations(hooks: pluggy.PluginManager, module: object, package: str, version: str) -> list[Plugin]:
    """What one plugin registers through each of its hooks. Raises what its code raises."""
    hooks.register(module)
    entries: list[Plugin] = []
    for caller in hooks.get_hookcallers(module) or []:
        kinds = [kind for kind, hook in KINDS.items() if hook == caller.name]
        if not kinds:
            raise UserError(f"there is no hook {caller.name!r}{nearest(caller.name, list(KINDS.values()))}")

        def register(
            name: str, factory: Any, summary: str, options: Any = None, kind: str = kinds[0]
        ) -> None:
            if not isinstance(name, str) or not re.fullmatch(r"[^\s.:]+", name):
                raise UserError(f"the name is {name!r}, expected a text without '.', ':' and spaces")
            if isinstance(factory, str) and not is_import_path(factory):
                raise UserError(f"{name!r} is made by {factory!r}, expected 'module:Class' or a class")
            entries.append(Plugin(kind, name, package, version, str(summary), "", factory, options))

        for implementation in caller.get_hookimpls():
            if implementation.plugin is module:
                implementation.function(register)
    return entries
