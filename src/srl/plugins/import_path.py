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
from dataclasses import is_dataclass
from functools import cache
from hashlib import blake2b
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from srl.errors import UserError, nearest
from srl.plugins.plugin import Plugin, in_one_line

if TYPE_CHECKING:
    from pydantic import BaseModel

_METHODS = {"retriever": ("search",), "reward": ("score",), "tool": ("call", "tools")}
"""The methods of which one tells a kind, looked for before anything is called."""
_directories: list[str] = []
_used: list[str] = []
_typed_names: set[str] = set()
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
    kinds = (kind for kind, names in _METHODS.items() if any(hasattr(target, name) for name in names))
    kind = next(kinds, "algorithm")
    if kind == "algorithm" and inspect.isclass(target) and not is_dataclass(target):
        methods = ", ".join(name for names in _METHODS.values() for name in names)
        raise UserError(f"{name} is no plugin: expected a class with one of the methods {methods}")
    return kind


def texts_in(value: Any) -> Iterator[str]:
    """The texts in options or settings, keys too: any of them may name a plugin."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts_in(list(value.items()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


def give_names(value: Any) -> None:
    """Note the names that a configuration has: their code may come from the user's directories."""
    _typed_names.update(text for text in texts_in(value) if ":" in text)


def may_import(name: str) -> bool:
    """Whether the code of `name`, which an index names, may be imported.

    It may not if it is in one of the user's directories alone, and the user did not name it.
    """
    module, colon, attribute = name.partition(":")
    if not colon or not _is_import_path(module, attribute) or name in _typed_names:
        return True
    top = module.partition(".")[0]
    own = [entry for entry in sys.path if entry not in _used]
    on_path = top in sys.builtin_module_names or PathFinder.find_spec(top, own) is not None
    return on_path or not any(_has(directory, top) for directory in _directories)


@cache
def imported(kind: str, name: str) -> Plugin:
    """The plugin that `module:Class` names; its version is a digest of the module's file.

    The class (or function) is called with nothing, or with its options, where its first parameter is
    annotated with a pydantic model; any other value is the plugin itself. Raises UserError.
    """
    target = _target(kind, name)
    methods = _METHODS.get(kind, ())
    if methods and not any(callable(getattr(target, method, None)) for method in methods):
        expected = " or ".join(map(repr, methods))
        raise UserError(f"{name} is not a valid {kind}: expected a class with a method {expected}")
    _typed_names.add(name)
    module = name.partition(":")[0]
    file = getattr(sys.modules[module], "__file__", None)
    version = blake2b(Path(file).read_bytes(), digest_size=6).hexdigest() if file else "unknown"
    summary = (inspect.getdoc(target) or "").partition("\n")[0]
    return Plugin(kind, name, module, version, summary, "", target, options_model_of(name, target))


def _target(kind: str, name: str) -> Any:
    """What the name stands for. Raises UserError."""
    module_name, _, attribute = name.partition(":")
    if not _is_import_path(module_name, attribute) or module_name.endswith(".py"):
        raise UserError(f"no {kind} {name!r}: expected MODULE:CLASS, as in mine:Mine for mine.py")
    importlib.invalidate_caches()
    top = module_name.partition(".")[0]
    if top not in sys.modules and PathFinder.find_spec(top) is None:
        for directory in _directories:
            if _has(directory, top):
                sys.path.append(directory)
                _used.append(directory)
                break
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        where = ", ".join(["Python's path", *_directories])
        hint = f"looked in {where}; elsewhere, type: PYTHONPATH=DIRECTORY srl …"
        raise UserError(
            f"{kind} {name!r} cannot be imported: {in_one_line(error)}",
            hint=hint if isinstance(error, ModuleNotFoundError) else "",
        ) from error
    if not hasattr(module, attribute):
        names = [member for member in vars(module) if not member.startswith("_")]
        raise UserError(f"no {kind} {name!r}: its module has no {attribute!r}{nearest(attribute, names)}")
    return getattr(module, attribute)


def _is_import_path(module: str, attribute: str) -> bool:
    return all(part.isidentifier() for part in (*module.split("."), attribute))


def _has(directory: str, module: str) -> bool:
    return Path(directory, f"{module}.py").is_file() or Path(directory, module, "__init__.py").is_file()


def options_model_of(name: str, factory: Any) -> type[BaseModel] | None:
    """The pydantic model that the first parameter of `factory` is annotated with. Raises UserError."""
    from pydantic import BaseModel

    parameters = list(inspect.signature(factory).parameters.values()) if callable(factory) else []
    if not parameters:
        return None
    first = parameters[0]
    try:
        hint = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory).get(first.name)
    except NameError:
        hint = None
    for candidate in (hint, *get_args(hint)):
        if inspect.isclass(candidate) and issubclass(candidate, BaseModel):
            return candidate
    if first.default is first.empty and first.kind is first.POSITIONAL_OR_KEYWORD:
        raise UserError(f"{name}: annotate {first.name!r} with a pydantic model, or give it a default")
    return None
