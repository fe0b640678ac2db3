"""Paths in a configuration: absolute in a run, so that it can be resumed from any directory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from srl.config.keys import Config, KeyPath, entry_of, flat
from srl.config.sections import OnDisk
from srl.errors import UserError
from srl.protocol import TEMPLATES


def located(config: Config) -> Config:
    """`config` with absolute paths, and with the directories of its `module:Class` plugins.

    A name that is not a path here, such as one on the hub, is kept.
    """
    from srl.plugins import manager
    from srl.plugins.import_path import used_directories

    if config.trainer.plugin_path is None and (used := used_directories()):
        config = config.with_settings({"trainer.plugin_path": used})
    tree = config.model_dump()
    for path in [path for path, _ in flat(tree) if (key := entry_of(path)) and _is_marked(key.field)]:
        section: dict[str, Any] = reduce(lambda below, part: below[part], path[:-1], tree)
        section[path[-1]] = _absolute(path, section[path[-1]])
    for kind in manager.KINDS:
        for plugin in getattr(config, kind).model_extra:
            tree[kind][plugin] = located_options(kind, plugin, tree[kind][plugin])
    for named in tree["search"]["retrievers"].values():
        named["options"] = located_options("retriever", named["retriever"] or "", named["options"])
    return Config.model_validate(tree)


def _absolute(path: KeyPath, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_absolute(path, each) for each in value)
    if not isinstance(value, str):
        return value
    if path == ("search", "cassette"):
        mode, _, file = value.partition(" ")
        return f"{mode} {os.path.abspath(file.strip())}"
    if path == ("data", "template") and (value in TEMPLATES or not os.path.isfile(value)):
        return value
    return os.path.abspath(value) if os.path.exists(value) else value


def _is_marked(kind: Any) -> bool:
    """Whether a field, or a part of its type, is `OnDisk`."""
    marks = (*getattr(kind, "metadata", ()), *getattr(kind, "__metadata__", ()))
    inner = getattr(kind, "annotation", kind)
    return any(isinstance(mark, OnDisk) for mark in marks) or any(map(_is_marked, get_args(inner)))


def located_options(kind: str, plugin: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a plugin with absolute paths: in fields of type `pathlib.Path`, and in texts marked with
    `json_schema_extra={"path": True}` that exist. A mapping of retrievers holds their options."""
    from srl.plugins import manager

    try:
        model = manager.options_model(kind, plugin)
    except UserError:  # it is not installed
        model = None
    absolute = dict(options)
    for name, value in options.items():
        field = model.model_fields.get(name) if model else None
        if isinstance(value, str) and field is not None:
            types = [field.annotation, *get_args(field.annotation)]
            words = [word for each in types for word in get_args(each)]
            extra = field.json_schema_extra
            is_path = Path in types and value not in words
            if is_path or (isinstance(extra, Mapping) and extra.get("path") and os.path.exists(value)):
                absolute[name] = os.path.abspath(value)
        elif isinstance(value, Mapping) and kind == "retriever":
            absolute[name] = {
                inner: located_options(kind, inner, below) if isinstance(below, Mapping) else below
                for inner, below in value.items()
            }
    return absolute
