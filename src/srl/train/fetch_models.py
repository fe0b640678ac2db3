"""Gives a run a local directory for each model: fetched from the Hugging Face hub, or made of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from srl.config import Config
from srl.models.hub import HubName, What, fetched, is_gguf, is_whole
from srl.train.convert_gguf import converted
from srl.train.make_missing import Note
from srl.workspace import Workspace


def with_local_models(config: Config, workspace: Workspace, note: Note) -> Config:
    """`config` with a directory for each model that it names on the hub or gives as a GGUF file.

    What is missing is fetched or converted once, and `note` is told. An existing directory takes precedence
    over a name. Raises UserError.
    """
    model, directories = config.model, dict[str, str]()
    for key, path, what in _models(config):
        if is_gguf(path):
            directories[key] = str(converted(Path(path), workspace, model, note))
        elif name := HubName.parse(path):
            snapshot = name.snapshot()
            if what == "model" and (snapshot is None or not is_whole(snapshot, what)):
                note(f"fetching {name} from the hub")
            directories[key] = str(fetched(name, what, trust_remote_code=model.trust_remote_code))
    return config.with_settings(directories)


def with_cached_models(config: Config) -> Config:
    """`config` with a directory for each model that the hub's cache has whole, for a dry run. No network."""
    snapshots = {}
    for key, path, what in _models(config):
        name = HubName.parse(path)
        snapshot = name.snapshot() if name else None
        if snapshot is not None and is_whole(snapshot, what):
            snapshots[key] = str(snapshot)
    return config.with_settings(snapshots)


def _models(config: Config) -> Iterator[tuple[str, str, What]]:
    """The keys that name a model, with what is wanted of each: no weights where a server has them."""
    if config.model.path is not None:
        yield "model.path", config.model.path, "tokenizer" if config.rollout.engine == "openai" else "model"
    if config.model.tokenizer is not None:
        yield "model.tokenizer", config.model.tokenizer, "tokenizer"
    if config.ref.path is not None and config.needs_reference:
        yield "ref.path", config.ref.path, "model"
