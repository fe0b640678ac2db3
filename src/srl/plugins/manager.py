"""Which plugins are installed, and how one is loaded.

Plugins are found through the entry-point group `srl`. Listing imports only the modules that entry
points name. A factory and its options are imported when the plugin is used.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pluggy

from srl.errors import SrlError, UserError, nearest
from srl.install import install_default, pip_install
from srl.plugins import hookspecs
from srl.plugins.plugin import Plugin as Plugin
from srl.plugins.user_code import in_one_line as in_one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.metadata import EntryPoint
    from types import ModuleType

    from pydantic import BaseModel

GROUP = "srl"
KINDS = {kind: f"srl_{kind}s" for kind in ("retriever", "reward", "algorithm", "provider")}
"""Each kind of plugin and its hook."""

UNKNOWN = "unknown"
"""The kind of a plugin whose module failed to import, so that its real kind is unknown."""


def plugin_manager() -> pluggy.PluginManager:
    """pluggy's manager with every plugin that could be imported, under `package/entry point`."""
    return _registry()[0]


def installed(kind: str | None = None) -> list[Plugin]:
    """Everything registered, by kind and name; the plugins that failed to import come last."""
    if kind is not None:
        _check_kind(kind)
    return [entry for entry in _registry()[1] if kind in (None, entry.kind)]


def load(kind: str, name: str, options: Mapping[str, Any] | None = None) -> object:
    """The plugin object that the factory makes of `options`, once they are validated.

    Raises UserError for an unknown or ambiguous name, options that do not fit, a missing package.
    """
    entry = find(kind, name)
    model = options_model(kind, name)
    if model is None and options:
        raise UserError(f"{entry} takes no options; remove {', '.join(map(repr, options))}")
    made = _import(entry, entry.factory)
    if callable(made):
        arguments = () if model is None else (_validated(entry, model, options or {}),)
        with named_errors(entry):
            made = made(*arguments)
    if kind == "algorithm":
        _check_algorithm(name, made)
    return made


def _check_algorithm(name: str, made: object) -> None:
    if not all(hasattr(made, member) for member in ("estimator", "needs_critic", "defaults")):
        raise UserError(
            f"{name} is not a valid algorithm: expected an srl.advantage.Algorithm, or a function that "
            "returns one"
        )


@contextmanager
def named_errors(entry: Plugin) -> Iterator[None]:
    """Around a call of a plugin's code: UserError for what it raises, with the plugin, the file and the line.

    A full disk stays what it is, and so does an error in the plugins of this project, which is a bug.
    """
    try:
        yield
    except SrlError:
        raise
    except Exception as error:
        if isinstance(error, ImportError) and not is_import_path(entry.name):
            raise UserError(_not_loaded(entry, error)) from error
        from srl.files import is_disk_full

        if is_disk_full(error) or entry.package in _own_packages():
            raise
        raise UserError(f"{entry} raised {in_one_line(error)}") from error


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


def find(kind: str, name: str) -> Plugin:
    """The only plugin of `kind` called `name`, or imported as `module:Class`.

    Raises UserError when there is none or more than one.
    """
    if is_import_path(name):
        from srl.plugins.import_path import imported

        _check_kind(kind)
        return imported(kind, name)
    known = installed(kind)
    found = [entry for entry in known if entry.name == name]
    if not found:
        raise UserError(_unknown(kind, name, [entry.name for entry in known]))
    if found[0].error:
        raise UserError(f"{found[0]} is ambiguous: {found[0].error}")
    return found[0]


def is_import_path(name: str) -> bool:
    """Whether a plugin's name is `module:Class`, and not that of an installed one."""
    return ":" in name


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise UserError(
            f"no kind of plugin {kind!r}: there are {', '.join(KINDS)}{nearest(kind, list(KINDS))}"
        )


def _unknown(kind: str, name: str, known: list[str]) -> str:
    """What to say, and what to type, when nothing of this name is installed."""
    broken = [f"{entry.package} ({entry.error})" for entry in installed() if entry.kind == UNKNOWN]
    also = f"; not importable: {', '.join(broken)}" if broken else ""
    if not installed():
        return f"no {kind} {name!r}: no plugin is installed; type: {install_default()}"
    if not known:
        return f"no {kind} {name!r}: no {kind} is installed{also}; type: {install_default()}"
    package = f"srl-search-{name}"
    step = pip_install(of=package) if package in _own_packages() else "srl plugins list"
    return f"no {kind} {name!r}: installed are {', '.join(known)}{also}; type: {step}{nearest(name, known)}"


def _own_packages() -> list[str]:
    """The plugin packages that `srl-search` itself names in its extras."""
    import re
    from importlib.metadata import PackageNotFoundError, requires

    try:
        return [re.split(r"[^\w.-]", line)[0] for line in requires("srl-search") or []]
    except PackageNotFoundError:
        return []


def _import(entry: Plugin, target: Any) -> Any:
    """What `"module:attribute"` names; anything else is returned as it is."""
    if not isinstance(target, str):
        return target
    from importlib import import_module

    module, _, attribute = target.partition(":")
    with named_errors(entry):
        found = import_module(module)
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        raise UserError(_not_loaded(entry, error)) from error


def _not_loaded(entry: Plugin, error: Exception) -> str:
    return f"{entry} could not be loaded: {error}"


def _validated(entry: Plugin, model: type[BaseModel], options: Mapping[str, Any]) -> BaseModel:
    from srl.plugins.options import validated

    return validated(f"{entry.kind}.{entry.name}", model, options)


def forget() -> None:
    """Clear the cached list of plugins."""
    _registry.cache_clear()


@cache
def _registry() -> tuple[pluggy.PluginManager, tuple[Plugin, ...]]:
    """Every plugin imported and asked what it registers; a module that raises is kept with its error."""
    plugins = pluggy.PluginManager("srl")
    plugins.add_hookspecs(hookspecs)
    found: list[Plugin] = []
    broken: list[Plugin] = []
    for package, version, point in _entry_points():
        try:
            module = point.load()
            plugins.register(module, f"{package}/{point.name}")
            found += _registrations(plugins, module, package, version)
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            kept = lines if isinstance(error, pluggy.PluginValidationError) else lines[:1]
            message = f"{type(error).__name__}: {'; '.join(kept)}".strip()
            broken.append(Plugin(UNKNOWN, point.name, package, version, "", message))
    order = list(KINDS)
    found.sort(key=lambda entry: (order.index(entry.kind), entry.name, entry.package))
    return plugins, (*_mark_duplicates(found), *broken)


def _entry_points() -> Iterator[tuple[str, str, EntryPoint]]:
    """Package, version and entry point, of the first installation of each package on the path."""
    from importlib.metadata import distributions

    seen: set[str] = set()
    for distribution in distributions():
        if f"[{GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue
        metadata = distribution.metadata
        package, version = metadata["Name"], metadata["Version"]
        if package not in seen:
            seen.add(package)
            yield from ((package, version, point) for point in distribution.entry_points.select(group=GROUP))


def _registrations(
    plugins: pluggy.PluginManager, module: ModuleType, package: str, version: str
) -> list[Plugin]:
    """What one plugin registers through each of its hooks."""
    found: list[Plugin] = []
    hooks = {hook: kind for kind, hook in KINDS.items()}
    others = plugins.get_plugins() - {module}
    for caller in plugins.get_hookcallers(module) or []:
        if caller.name not in hooks:
            raise UserError(f"there is no hook {caller.name!r}{nearest(caller.name, list(hooks))}")
        register = _Register(hooks[caller.name], package, version, found)
        plugins.subset_hook_caller(caller.name, others)(register=register)
    return found


@dataclass(frozen=True, slots=True)
class _Register:
    """What a hook is given as `register`: it notes entries of one kind from one package."""

    kind: str
    package: str
    version: str
    found: list[Plugin]

    def __call__(self, name: str, factory: Any, summary: str, options: Any = None) -> None:
        if not isinstance(name, str) or not name or any(one in ".:" or one.isspace() for one in name):
            raise UserError(f"register: the name is {name!r}, expected a text without '.', ':' and spaces")
        if not isinstance(summary, str):
            raise UserError(f"register: the summary of {name!r} is {summary!r}, expected a text")
        if isinstance(factory, str) and not is_import_path(factory):
            raise UserError(f"register: {name!r} is made by {factory!r}, expected 'module:Class' or a class")
        self.found.append(Plugin(self.kind, name, self.package, self.version, summary, "", factory, options))


def _mark_duplicates(found: list[Plugin]) -> list[Plugin]:
    """`found`, where entries that share kind and name carry an error that names all their packages."""
    packages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in found:
        packages[entry.kind, entry.name].append(entry.package)
    return [_marked(entry, packages[entry.kind, entry.name]) for entry in found]


def _marked(entry: Plugin, packages: list[str]) -> Plugin:
    if len(packages) == 1:
        return entry
    return replace(entry, error=f"registered by {' and '.join(packages)}; type: pip uninstall one of them")
