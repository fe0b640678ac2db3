"""Opening an index, to search it in local training, in the server and in evaluation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.index.build import build_parameters, make_manifest
from srl.index.manifest import Manifest, check_index
from srl.index.passages import open_passages
from srl.index.retriever import (
    Fault,
    as_retriever,
    identity_of,
    load_retriever,
    open_retriever,
    outcomes_of,
)
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated
from srl.safe import quoted
from srl.trajectory import Hit, Passage

_logger = logging.getLogger(__name__)


class Index:
    """An open retriever with its memory-mapped passages. Safe to use from many threads.

    `directory` and `passages` are None for a `live` retriever, which indexes nothing. A `parallel` one runs
    at full speed in several threads at once, each on a core of its own.
    """

    def __init__(self, directory: Path | None, manifest: Manifest, retriever: object) -> None:
        self.directory = directory
        self.manifest = manifest
        self._retriever = as_retriever(retriever)
        self.live, self.parallel = self._retriever.live, self._retriever.parallel
        self.passages = None if self.live or directory is None else open_passages(directory)

    @property
    def digest(self) -> str:
        """The digest of corpus, retriever and parameters, the same on every machine."""
        return self.manifest.digest

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return self._retriever.search(list(queries), k) if queries else []

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or a `Fault`; exceptions of the retriever become faults.

        Where a call fails, its queries are searched one by one, so that only the failing ones are lost.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return outcomes_of(self._retriever, list(queries), k)

    def passage(self, name: str) -> Passage:
        """The passage with this id, or else the first one with this web address. Raises KeyError."""
        if self.passages is None:
            raise KeyError(name)
        return self.passages.passage(name)

    def __len__(self) -> int:
        return self.manifest.passages


def open_index(directory: Path | str, options: Mapping[str, Any] | None = None) -> Index:
    """Open the index at `directory`; `options` may change options of the machine (threads, devices).

    Raises UserError where there is no index, where it is incomplete, where its plugin is not installed, and
    where an option or a model differs from the one it was built with.
    """
    directory = Path(directory)
    manifest = check_index(directory)
    check_may_import(directory, manifest)
    name, entry = manifest.retriever, manager.find("retriever", manifest.retriever)
    retriever = load_retriever(name, _options(directory, manifest, options or {}))
    version = f"{entry.package} {entry.version}"
    if manager.is_import_path(name) and manifest.retriever_version != version:
        _logger.warning(
            "%s was built by %s, which is now %s; build it again if that matters",
            directory, manifest.retriever_version, version,
        )  # fmt: skip
    try:
        with manager.named_errors(entry):
            searcher = open_retriever(retriever, directory)
        index = Index(directory, manifest, searcher)
    except (OSError, ValueError, EOFError, KeyError) as error:
        cause = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise UserError(f"{directory} cannot be opened: {cause}", hint="copy or build it again") from error
    if index.passages is not None and len(index.passages) != manifest.passages:
        raise UserError(
            f"{directory}: expected {manifest.passages:,} passages, found {len(index.passages):,}"
        )
    identity = identity_of(name, searcher)
    for what, before in manifest.identity.items():
        if identity.get(what) != before:
            now = quoted(identity.get(what, ""), 60)
            raise UserError(f"{directory} was built with another {what}: {quoted(before, 60)!r}, not {now!r}")
    return index


def check_may_import(directory: Path, manifest: Manifest) -> None:
    """Raises UserError for a retriever of the index whose code is in the user's own directory alone: the
    index may be somebody else's."""
    from srl.plugins.import_path import may_import, texts_in

    for name in (manifest.retriever, *texts_in(manifest.options)):
        if not may_import(name):
            module = name.partition(":")[0].partition(".")[0]
            raise UserError(
                f"{directory} names the retriever {name!r}: there is no module {module!r} in Python's path",
                hint="if you trust its code, type: PYTHONPATH=DIRECTORY srl …, with its directory",
            )


def live_index(retriever: str, options: Mapping[str, Any] | None = None) -> Index:
    """An index without a directory, of a `live` retriever such as `web`.

    Raises UserError for a retriever that needs a built index, and where the retriever cannot start.
    """
    live = load_retriever(retriever, options)
    if not live.live:
        raise UserError(f"{retriever} searches an index", hint="build one: srl index build")
    with manager.named_errors(manager.find("retriever", retriever)):
        searcher = open_retriever(live, None)
    parameters, identity = build_parameters(retriever, options or {}), identity_of(retriever, searcher)
    return Index(None, make_manifest(retriever, parameters, identity), searcher)


def _options(directory: Path, manifest: Manifest, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the build, with those of `options` that may differ. Raises UserError for the others.

    Machine-dependent options are the user's alone: no build writes them, and those that a manifest has
    nevertheless, such as `trust_remote_code`, are left out.
    """
    name = manifest.retriever
    model = manager.options_model("retriever", name)
    if model is None:
        if options:
            raise UserError(f"{name} has no options", key=f"retriever.{name}.{next(iter(options))}")
        return {}
    defaults = build_parameters(name, manifest.options)
    built = {option: defaults[option] for option in manifest.options if option in defaults}
    checked = build_parameters(name, {**built, **options})
    for option in options:
        if option in checked and checked[option] != built.get(option):
            raise UserError(
                f"{directory} was built with {option}={built.get(option)}, not {checked[option]}",
                key=f"retriever.{name}.{option}",
                hint="leave the option out, or build the index again with it",
            )
    parameters = validated(f"retriever.{name}", model, {**built, **options})
    runtime = runtime_options(model) & parameters.model_fields_set
    return {**built, **parameters.model_dump(mode="json", include=runtime)}
