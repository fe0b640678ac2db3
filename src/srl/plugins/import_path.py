"""Plugins without a package: `module:Class`, imported from Python's path or from the user's own directory.

The user's directories (`look_in`) hold for a name that the user typed or that a run saved. They do not for
what an index names (`may_import`): it may be somebody else's, and its code is looked for on Python's path
alone.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from srl.errors import UserError, nearest
from srl.plugins.plugin import Plugin
from srl.plugins.user_code import in_one_line

if TYPE_CHECKING:
    from types import ModuleType

    from pydantic import BaseModel

_METHODS = {"retriever": "search", "reward": "score"}
"""The method that tells a kind, looked for before anything is called."""
_directories: list[str] = []
_used: list[str] = []
_named: set[str] = set()
"""The names that the user typed, or that a configuration has."""


def look_in(*directories: Path | str) -> None:
    """Import modules from `directories` too, where Python's own path does not have them."""
    for directory in directories:
        if (path := str(Path(directory).absolute())) not in _directories:
            _directories.append(path)


def used_directories() -> tuple[str, ...]:
    """Those directories of `look_in` from which a module was imported."""
    return tuple(_used)


def kind_of(name: str) -> str:
    """The kind of plugin that `module:Class` is, told by its members. Raises UserError."""
    target = _target("plugin", name)
    members = {**_METHODS, "provider": "url"}
    return next((kind for kind, member in members.items() if hasattr(target, member)), "algorithm")


def texts_in(value: Any) -> Iterator[str]:
    """The texts in options or settings, keys too: any of them may name a plugin."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from (str(key), *texts_in(one))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from texts_in(one)


def give_names(value: Any) -> None:
    """Note the names that a configuration has: their code may come from the user's directories."""
    _named.update(text for text in texts_in(value) if ":" in text)


def may_import(name: str) -> bool:
    """Whether the code of `name`, which an index names, may be imported.

    It may not if it is in one of the user's directories alone, and no configuration has the name.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), attribute)):
        return True  # not a name of this kind
    top = module.partition(".")[0]
    if name in _named or top in sys.modules:
        return True
    spec = find_spec(top)
    if spec is None:
        return not any(_has(directory, top) for directory in _directories)
    places = (spec.origin, *(spec.submodule_search_locations or ()))
    return not any(Path(place).is_relative_to(used) for place in places if place for used in _used)


@cache
def imported(kind: str, name: str) -> Plugin:
    """The plugin that `module:Class` names; its version is a digest of the module's file.

    The class (or function) is called with nothing, or with its options, where its first parameter is
    annotated with a pydantic model; any other value is the plugin itself. Raises UserError.
    """
    target = _target(kind, name)
    method = _METHODS.get(kind)
    if method and not callable(getattr(target, method, None)):
        raise UserError(f"{name} is not a valid {kind}: expected a class with a method {method!r}")
    _named.add(name)
    summary = (inspect.getdoc(target) or "").partition("\n")[0]
    module = name.partition(":")[0]
    return Plugin(kind, name, module, _digest(module), summary, "", target, options_model_of(name, target))


def _target(kind: str, name: str) -> Any:
    """What the name stands for."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise UserError(
            f"no {kind} {name!r}: expected MODULE:CLASS, as in my_plugins:Mine for my_plugins.py in the "
            "current directory"
        )
    module = _module(kind, name, module_name)
    if not hasattr(module, attribute):
        known = [other for other in vars(module) if not other.startswith("_")]
        where = getattr(module, "__file__", None) or module_name
        raise UserError(f"no {kind} {name!r}: {where} has no {attribute!r}{nearest(attribute, known)}")
    return getattr(module, attribute)


def _module(kind: str, name: str, module: str) -> ModuleType:
    importlib.invalidate_caches()
    top = module.partition(".")[0]
    if top not in sys.modules and find_spec(top) is None:
        _make_importable(top)
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module}.".startswith(f"{missing}."):
            raise UserError(f"no {kind} {name!r}: {_not_found(name, missing)}") from error
        raise UserError(f"{kind} {name!r} cannot be imported: {in_one_line(error)}") from error


def _not_found(name: str, missing: str) -> str:
    """What to type instead of `name`, of which the module `missing` was not found."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        return f"expected a module, not a file; type {module.removesuffix('.py')}:{attribute}"
    places = ", ".join(["Python's path", *_directories])
    return (
        f"there is no module {missing!r} in {places}; "
        f"type: PYTHONPATH=DIRECTORY srl …, with the directory of {missing}.py"
    )


def _make_importable(module: str) -> None:
    """Put the first directory that has `module` at the end of Python's path."""
    for directory in _directories:
        if _has(directory, module):
            sys.path.append(directory)
            _used.append(directory)
            return


def _has(directory: str, module: str) -> bool:
    return Path(directory, f"{module}.py").is_file() or Path(directory, module, "__init__.py").is_file()


def options_model_of(name: str, factory: Any) -> type[BaseModel] | None:
    """The pydantic model that the first parameter of `factory` is annotated with."""
    from pydantic import BaseModel

    if not callable(factory):
        return None
    first = next(iter(inspect.signature(factory).parameters.values()), None)
    if first is None:
        return None
    try:
        hint = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory).get(first.name)
    except NameError:
        hint = None
    for candidate in (hint, *get_args(hint)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    if first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD:
        raise UserError(
            f"{name} is called without arguments or with its options; annotate {first.name!r} with a "
            "pydantic model, or give it a default"
        )
    return None


def _digest(module: str) -> str:
    """12 hex digits of the module's file, so that two machines can tell whether they have the same."""
    file = getattr(sys.modules[module], "__file__", None)
    return blake2b(Path(file).read_bytes(), digest_size=6).hexdigest() if file else "unknown"
