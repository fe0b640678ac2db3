"""Gives a run a local directory for each model that it names on the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator

from srl.config import Config
from srl.models.hub import HubName, What, fetched
from srl.train.make_missing import Note


def with_local_models(config: Config, note: Note) -> Config:
    """`config` with a directory for each model that it names on the hub, fetched where it is missing.

    `note` is told. An existing directory takes precedence over a name. Raises UserError.
    """
    directories = {}
    for key, name, what in _models(config):
        if what == "model" and name.snapshot(what) is None:
            note(f"fetching {name} from the hub")
        directories[key] = str(fetched(name, what, trust_remote_code=config.model.trust_remote_code))
    return config.with_settings(directories)


def with_cached_models(config: Config) -> Config:
    """`config` with a directory for each model that the hub's cache has, for a dry run. No network."""
    snapshots = {key: name.snapshot(what) for key, name, what in _models(config)}
    return config.with_settings({key: str(folder) for key, folder in snapshots.items() if folder})


def _models(config: Config) -> Iterator[tuple[str, HubName, What]]:
    """The keys that name a model on the hub, and what is wanted of it: no weights where a server has them."""
    model, reference = config.model, config.ref.path
    if reference is not None and not config.needs_reference:
        reference = None
    of_policy: What = "tokenizer" if config.rollout.engine == "openai" else "model"
    models: list[tuple[str, str | None, What]] = [
        ("model.path", model.path, of_policy),
        ("model.tokenizer", model.tokenizer, "tokenizer"),
        ("ref.path", reference, "model"),
    ]
    for key, path, what in models:
        if path is not None and (name := HubName.parse(path)):
            yield key, name, what
