"""Opening an index, to search it in local training, in the server and in evaluation."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.index.build import build_parameters, make_manifest
from srl.index.manifest import Manifest, check_files, read_index_manifest
from srl.index.passages import open_passages
from srl.index.retriever import (
    Fault,
    RetrieverBase,
    as_retriever,
    identity_of,
    load_retriever,
    open_retriever,
    outcomes_of,
)
from srl.index.verification import verify_once
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated
from srl.safe_text import quoted
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

    Raises UserError where there is no index, where it is incomplete or of a newer version, where its plugin
    is not installed, and where an option or a model differs from the one it was built with.
    """
    directory = Path(directory)
    manifest = check_index(directory)
    check_may_import(directory, manifest)
    verify_once(directory, manifest)
    made = load_retriever(manifest.retriever, _options(directory, manifest, options or {}))
    _warn_of_other_code(directory, manifest)
    retriever = _open(manifest.retriever, made, directory)
    _check_same(directory, manifest, identity_of(manifest.retriever, retriever))
    index = Index(directory, manifest, retriever)
    if index.passages is not None and len(index.passages) != manifest.passages:
        raise UserError(
            f"{directory}: expected {manifest.passages:,} passages, found {len(index.passages):,}; "
            "build the index again"
        )
    return index


def check_may_import(directory: Path, manifest: Manifest) -> None:
    """Raises UserError for a retriever of the index whose code is in the user's own directory alone: the
    index may be somebody else's."""
    from srl.plugins.import_path import may_import, texts_in

    for name in (manifest.retriever, *texts_in(manifest.options)):
        if not may_import(name):
            module = name.partition(":")[0].partition(".")[0]
            raise UserError(
                f"{directory} names the retriever {name!r}: there is no module {module!r} in Python's path; "
                "if you trust its code, type: PYTHONPATH=DIRECTORY srl …, with its directory"
            )


def _open(name: str, retriever: RetrieverBase, directory: Path) -> RetrieverBase:
    """Open a retriever on its files. Raises UserError where its plugin cannot read them."""
    try:
        with manager.named_errors(manager.find("retriever", name)):
            return open_retriever(retriever, directory)
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise UserError(
            f"{directory} cannot be opened; its files are damaged or of another version: "
            f"{type(error).__name__}: {error}; copy or build it again".replace("\n", " ")
        ) from error


def live_index(retriever: str, options: Mapping[str, Any] | None = None) -> Index:
    """An index without a directory, of a `live` retriever such as `web`.

    Raises UserError for a retriever that needs a built index, and where the retriever cannot start.
    """
    live = load_retriever(retriever, options)
    if not live.live:
        raise UserError(f"{retriever} searches an index; type: srl index build --retriever {retriever} …")
    with manager.named_errors(manager.find("retriever", retriever)):
        opened = open_retriever(live, None)
    parameters, identity = build_parameters(retriever, options or {}), identity_of(retriever, opened)
    return Index(None, make_manifest(retriever, parameters, identity), opened)


def _warn_of_other_code(directory: Path, manifest: Manifest) -> None:
    """Say where the user's own code has changed since the index was built."""
    entry = manager.find("retriever", manifest.retriever)
    now = f"{entry.package} {entry.version}"
    if manager.is_import_path(manifest.retriever) and manifest.retriever_version != now:
        _logger.warning(
            "%s was built by another version of %s (%s, now %s); build it again if that matters",
            directory, manifest.retriever, manifest.retriever_version, now,
        )  # fmt: skip


def _check_same(directory: Path, manifest: Manifest, found: Mapping[str, str]) -> None:
    """Raise UserError where something besides the options (a model, say) differs from the build's."""
    for name, digest in manifest.identity.items():
        if found.get(name) != digest:
            raise UserError(
                f"{directory} was built with another {name}: expected {_shown(digest)}, found "
                f"{_shown(found.get(name))}; use the one it was built with, or build the index again"
            )


_DIGEST = re.compile(r"[0-9a-f]{32,}")


def _shown(value: str | None) -> str:
    """The beginning of a digest; other values, such as a prefix of queries, are quoted."""
    if value is None:
        return "none"
    return f"digest {value[:12]}" if _DIGEST.fullmatch(value) else repr(quoted(value, 60))


def check_index(directory: Path | str) -> Manifest:
    """The manifest. Raises UserError unless the sizes and both ends of all files are right."""
    manifest = read_index_manifest(directory)
    check_files(Path(directory), manifest)
    return manifest


def _options(directory: Path, manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the build, with those given that may differ. Raises UserError for the others.

    Machine-dependent options are the user's alone: no build writes them, and those that a manifest has
    nevertheless, such as `trust_remote_code`, are left out.
    """
    known = build_parameters(manifest.retriever, manifest.options)
    built = {name: known[name] for name in manifest.options if name in known}
    asked = build_parameters(manifest.retriever, {**built, **given})
    for name in given:
        if name in asked and asked[name] != built.get(name):
            raise UserError(
                f"{directory} was built with {name}={built.get(name)}, not {asked[name]}; "
                f"leave the option out, or type: srl index build --set {name}={asked[name]} …"
            )
    model = manager.options_model("retriever", manifest.retriever)
    if model is None:
        if given:
            raise UserError(f"no option retriever.{manifest.retriever}.{next(iter(given))}: it has none")
        return built
    checked = validated(f"retriever.{manifest.retriever}", model, {**built, **given})
    runtime = runtime_options(model) & checked.model_fields_set
    return {**built, **checked.model_dump(mode="json", include=runtime)}
