"""An index, open: what local training, the server and evaluation search with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.index.build import build_parameters, make_manifest, runtime_options
from srl.index.manifest import Manifest, check_files, read_index_manifest
from srl.index.passages import open_passages
from srl.index.retriever import (
    Fault,
    RetrieverBase,
    as_retriever,
    load_retriever,
    open_retriever,
    outcomes_of,
)
from srl.index.verification import verify_once
from srl.plugins import manager
from srl.plugins.options import validated
from srl.trajectory import Hit, Passage


class Index:
    """A retriever, open, with its passages memory-mapped. Safe to use from many threads.

    `directory` and `passages` are None where nothing was indexed: the retriever is `live`. A retriever
    that says it is `parallel` searches as fast in two threads as in one, each on a core of its own.
    """

    def __init__(self, directory: Path | None, manifest: Manifest, retriever: object) -> None:
        self.directory = directory
        self.manifest = manifest
        self._retriever = as_retriever(retriever)
        self.live, self.parallel = self._retriever.live, self._retriever.parallel
        self.passages = None if self.live or directory is None else open_passages(directory)

    @property
    def digest(self) -> str:
        """What this index is: the same on every machine, another for another corpus or other parameters."""
        return self.manifest.digest

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return self._retriever.search(list(queries), k) if queries else []

    def outcomes(self, queries: list[str], k: int) -> list[list[Hit] | Fault]:
        """For each query its hits, or why there are none; never an exception of the retriever's.

        Where a call fails the queries are tried one by one, so that only the one at fault pays.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return outcomes_of(self._retriever, list(queries), k)

    def passage(self, passage_id: str) -> Passage:
        """The passage with this id. Raises KeyError where there is none."""
        if self.passages is None:
            raise KeyError(passage_id)
        return self.passages.passage(passage_id)

    def __len__(self) -> int:
        return self.manifest.passages


def open_index(directory: Path | str, options: Mapping[str, Any] | None = None) -> Index:
    """Open the index at `directory`; `options` may change what belongs to the machine (threads, devices).

    Raises UserError for what is no index, is newer, is not whole, needs a plugin that is not
    installed, and for an option or a model that is not the one the index was built with.
    """
    directory = Path(directory)
    manifest = check_index(directory)
    verify_once(directory, manifest)
    made = load_retriever(manifest.retriever, _options(directory, manifest, options or {}))
    retriever = _open(made, directory)
    _check_same(directory, manifest, retriever.identity())
    index = Index(directory, manifest, retriever)
    if index.passages is not None and len(index.passages) != manifest.passages:
        raise UserError(
            f"{directory}: {manifest.passages:,} passages expected, {len(index.passages):,} found; "
            "build the index again"
        )
    return index


def _open(retriever: RetrieverBase, directory: Path) -> RetrieverBase:
    """Open a retriever on its files. Raises UserError where these are not what its plugin wrote."""
    try:
        return open_retriever(retriever, directory)
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise UserError(
            f"{directory} cannot be opened, its files are damaged or from another version: "
            f"{type(error).__name__}: {error}; copy or build it again".replace("\n", " ")
        ) from error


def live_index(retriever: str, options: Mapping[str, Any] | None = None) -> Index:
    """An index without a directory: a retriever that searches outside, such as `web`.

    Raises UserError for a retriever that needs an index built, and for what it cannot start without.
    """
    engine = load_retriever(retriever, options)
    if not engine.live:
        raise UserError(f"{retriever} searches an index; type: srl index build --retriever {retriever} …")
    opened = open_retriever(engine, None)
    parameters, identity = build_parameters(retriever, options or {}), dict(opened.identity())
    return Index(None, make_manifest(retriever, parameters, identity), opened)


def _check_same(directory: Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Whether what the retriever depends on besides its options is what the index was built with."""
    for name, digest in manifest.identity.items():
        if found.get(name) != digest:
            raise UserError(
                f"{directory} was built with another {name} ({digest[:12]}, here it is "
                f"{found.get(name, 'none')[:12]}); give the one it was built with, or build the index again"
            )


def check_index(directory: Path | str) -> Manifest:
    """The manifest, if the files of the index are there and, as far as their ends tell, its own."""
    manifest = read_index_manifest(directory)
    check_files(Path(directory), manifest)
    return manifest


def _options(directory: Path, manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the index was built with, and of those given the ones that may differ."""
    asked = build_parameters(manifest.retriever, {**manifest.options, **given})
    for name in given:
        if name in asked and asked[name] != manifest.options.get(name):
            raise UserError(
                f"{directory} was built with {name}={manifest.options.get(name)}, not {asked[name]}; "
                f"leave the option out, or type: srl index build --set {name}={asked[name]} …"
            )
    model = manager.options_model("retriever", manifest.retriever)
    if model is None:
        return dict(manifest.options)
    checked = validated(f"retriever.{manifest.retriever}", model, {**manifest.options, **given})
    runtime = runtime_options(model) & checked.model_fields_set
    return {**manifest.options, **checked.model_dump(mode="json", include=runtime)}
