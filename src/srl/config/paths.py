"""Paths in a configuration: absolute in a run, so that it can be resumed from any directory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from srl.config.keys import Config, KeyPath, flat, place
from srl.config.sections import OnDisk
from srl.errors import UserError
from srl.protocol import TEMPLATES


def located(config: Config) -> Config:
    """`config` with absolute paths, and with the directories of its `module:Class` plugins.

    A name that is not a path here, such as one on the hub, is kept.
    """
    from srl.plugins.import_path import used_directories

    if config.trainer.plugin_path is None and (used := used_directories()):
        config = config.with_settings({"trainer.plugin_path": used})
    tree = config.model_dump()
    on_disk = [(path, False) for path, _ in flat(tree) if (field := place(path)[1]) and _is_marked(field)]
    for path, is_sure in [*on_disk, *_options(config)]:
        node: dict[str, Any] = reduce(lambda below, part: below[part], path[:-1], tree)
        node[path[-1]] = _absolute(path, node[path[-1]], is_sure)
    return Config.model_validate(tree)


def _absolute(path: KeyPath, value: Any, is_sure: bool) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_absolute(path, each, is_sure) for each in value)
    if not isinstance(value, str):
        return value
    if path == ("search", "cassette"):
        mode, _, file = value.partition(" ")
        return f"{mode} {os.path.abspath(file.strip())}"
    if path == ("data", "template") and (value in TEMPLATES or not os.path.isfile(value)):
        return value
    return os.path.abspath(value) if is_sure or os.path.exists(value) else value


def _is_marked(kind: Any) -> bool:
    """Whether a field, or a part of its type, is `OnDisk`."""
    marks = (*getattr(kind, "metadata", ()), *getattr(kind, "__metadata__", ()))
    inner = getattr(kind, "annotation", kind)
    return any(isinstance(mark, OnDisk) for mark in marks) or any(map(_is_marked, get_args(inner)))


Paths = Iterator[tuple[KeyPath, bool]]
"""Keys with a path, and whether it is a path even if nothing exists there yet."""


def _options(config: Config) -> Paths:
    """The options of plugins that hold paths."""
    for kind in ("retriever", "reward", "algorithm", "tool"):
        section = getattr(config, kind)
        for name in section.model_extra:
            yield from _below((kind, name), option_paths(kind, name, section.options(name)))
    for name, retriever in config.search.retrievers.items():
        paths = option_paths("retriever", retriever.retriever or "", retriever.options)
        yield from _below(("search", "retrievers", name, "options"), paths)


def _below(base: KeyPath, paths: Paths) -> Paths:
    yield from (((*base, *path), is_sure) for path, is_sure in paths)


def option_paths(kind: str, plugin: str, options: Mapping[str, Any]) -> Paths:
    """The options of a plugin that hold paths.

    These are fields of type `pathlib.Path`, and texts marked with `json_schema_extra={"path": True}`. A
    mapping of retrievers holds their options.
    """
    from srl.plugins import manager

    try:
        model = manager.options_model(kind, plugin)
    except UserError:  # it is not installed
        model = None
    for name, value in options.items():
        field = model.model_fields.get(name) if model else None
        if isinstance(value, str) and field is not None:
            types = [field.annotation, *get_args(field.annotation)]
            words = [word for each in types for word in get_args(each)]
            extra = field.json_schema_extra
            if Path in types and value not in words:
                yield (name,), True
            elif isinstance(extra, Mapping) and extra.get("path"):
                yield (name,), False
        elif isinstance(value, Mapping) and kind == "retriever":
            for inner, below in value.items():
                if isinstance(below, Mapping):
                    yield from _below((name, inner), option_paths(kind, inner, below))
