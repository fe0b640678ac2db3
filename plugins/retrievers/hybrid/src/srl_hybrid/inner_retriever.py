"""Retrievers inside `hybrid` and `rerank`: their options, folders and hits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from srl.errors import UserError
from srl.index import Fault
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated
from srl.trajectory import Hit

Options = Mapping[str, Any]


def split(where: str, name: str, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the options of retriever `name`: those of the index, with defaults, and machine-dependent ones.

    Raises UserError if they are invalid; `where` is the prefix of the dotted keys in its message.
    """
    model = manager.options_model("retriever", name)
    if model is None:
        if options:
            raise UserError(f"{where} takes no options; remove {', '.join(options)}")
        return {}, {}
    checked, runtime = validated(where, model, options), runtime_options(model)
    machine = checked.model_dump(mode="json", include=runtime & checked.model_fields_set)
    return checked.model_dump(mode="json", exclude=runtime), machine


def with_runtime(where: str, name: str, options: Options, runtime: Options) -> dict[str, Any]:
    """The machine-dependent options in `options`, overridden by `runtime`, which may contain no others."""
    build, machine = split(where, name, options)
    for key in runtime:
        if key in build:
            raise UserError(f"{where}.{key} is part of the index, not a machine-dependent option")
    return split(where, name, {**build, **machine, **runtime})[1]


def folders(name: str, options: Options) -> list[str]:
    """The folders of an index that the retriever writes, with those of the retrievers inside it."""
    if name == "hybrid":
        return [folder for pair in options["retrievers"].items() for folder in folders(*pair)]
    if name == "rerank":
        return folders(options["retriever"], options["options"])
    return [name]


def named_errors(name: str) -> AbstractContextManager[None]:
    """Around a call of the retriever `name`: what a third party's raises is its error, not this package's."""
    return manager.named_errors(manager.find("retriever", name))


def hits_of(found: Iterable[list[Hit] | Fault]) -> list[list[Hit]]:
    """`found` if every query has hits. Raises the first fault otherwise."""
    hits = []
    for outcome in found:
        if isinstance(outcome, Fault):
            raise outcome
        hits.append(outcome)
    return hits
