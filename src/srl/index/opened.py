"""An index, open: what local training, the server and evaluation search with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.index.build import build_parameters, runtime_options
from srl.index.manifest import Manifest, check_files, read_index_manifest
from srl.index.passages import FOLDER, PassageStore
from srl.plugins import manager
from srl.trajectory import Hit, Passage


class Index:
    """A corpus with its retriever, memory-mapped. Safe to use from many threads."""

    def __init__(self, directory: Path, manifest: Manifest, retriever: Any) -> None:
        self.directory = directory
        self.manifest = manifest
        self.passages = PassageStore(directory / FOLDER)
        self._retriever = retriever

    @property
    def digest(self) -> str:
        """What this index is: the same on every machine, another for another corpus or other parameters."""
        return self.manifest.digest

    def search(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Up to `k` hits for each query, best first, equal scores in the order of the corpus."""
        if k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        hits: list[list[Hit]] = self._retriever.search(list(queries), k) if queries else []
        return hits

    def passage(self, passage_id: str) -> Passage:
        """The passage with this id. Raises KeyError where there is none."""
        return self.passages.passage(passage_id)

    def __len__(self) -> int:
        return self.manifest.passages


def open_index(directory: Path | str, options: Mapping[str, Any] | None = None) -> Index:
    """Open the index at `directory`; `options` may change what belongs to the machine (threads, devices).

    Raises UserError for what is no index, is newer, is not whole, needs a plugin that is not
    installed, and for an option that contradicts what the index was built with.
    """
    directory = Path(directory)
    manifest = check_index(directory)
    retriever: Any = manager.load(
        "retriever", manifest.retriever, _options(directory, manifest, options or {})
    )
    retriever.open(directory)
    index = Index(directory, manifest, retriever)
    if len(index.passages) != manifest.passages:
        raise UserError(
            f"{directory}: {manifest.passages:,} passages expected, {len(index.passages):,} found; "
            "build the index again"
        )
    return index


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
    runtime = runtime_options(model) if model else set()
    return {**manifest.options, **{name: value for name, value in given.items() if name in runtime}}
