"""Building an index: store the passages, let the retriever index them, write the manifest.

An index appears whole or not at all. A build that takes long (`resumable`) works in `<out>.building`, which a
kill leaves behind and the same command continues.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from srl import __version__
from srl.data.corpus import read_corpus
from srl.errors import CheckFailed, UserError
from srl.files import (
    FORMAT,
    MANIFEST,
    atomic_directory,
    checksums,
    read_json,
    replaceable,
    resumable_directory,
    write_json,
)
from srl.index.manifest import KIND, Manifest, index_digest, read_index_manifest, sizes_of
from srl.index.passages import FOLDER, CorpusDigest, PassageStore, keep_passages
from srl.index.retriever import RetrieverBase, build_live, identity_of, load_retriever
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated
from srl.trajectory import Passage

Progress = Callable[[str, int, int | None], None]
"""Called with the current stage, the passages done, and their number (None: not known yet)."""
NOTE = "building.json"
"""Says in an unfinished index what is being built."""
_REPLACEABLE = replaceable(KIND, "an index", besides=(MANIFEST, NOTE))


def build_index(
    corpus: Path | str | Iterable[Passage] | None,
    out: Path | str,
    retriever: str = "bm25",
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Build the index of `corpus` (a file, or passages) at `out`.

    A `live` retriever takes no corpus; its `build`, if it has one, gets None. An existing index is replaced
    only with `overwrite`, any other directory never.

    Raises UserError for an unknown retriever or option, a bad line of the corpus, and an `out` that exists.
    """
    builder = load_retriever(retriever, options)
    if builder.live and corpus is not None:
        raise UserError(f"{retriever} searches a live source and takes no corpus", key="corpus")
    if not builder.live and corpus is None:
        raise UserError(f"{retriever} needs a corpus to index", key="corpus")
    source = None if corpus is None else _source(corpus)
    return _build(
        builder, retriever, options, Path(out), source, progress, overwrite, builder.build, builder.resumable
    )


def import_index(
    source: Path | str,
    out: Path | str,
    retriever: str,
    options: Mapping[str, Any] | None = None,
    corpus: Path | str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Import the index that another program built at `source`: its files are linked or copied to `out`.

    The passages come from `corpus`, or from `source` where it holds them. Raises UserError where the
    retriever cannot import, or the files do not fit the passages.
    """
    source = Path(source)
    builder = load_retriever(retriever, options)
    adopt = builder.adopt
    if adopt is None:
        raise UserError(f"{retriever} cannot import an index", hint="build one of the corpus instead")
    if not source.exists():
        raise UserError(f"no file or directory {source} to import")
    if corpus is None and builder.passages_in is None:
        raise UserError(f"{source} has no passages", hint="add --corpus FILE, which it was built from")
    passages = _source(corpus) if corpus else (source.name, builder.passages_in(source))  # type: ignore[misc]

    link = partial(adopt, source)
    return _build(builder, retriever, options, Path(out), passages, progress, overwrite, link, False)


def _build(
    builder: RetrieverBase,
    retriever: str,
    options: Mapping[str, Any] | None,
    out: Path,
    source: tuple[str, Iterator[Passage]] | None,
    progress: Progress | None,
    overwrite: bool,
    make: Callable[[PassageStore, Path, Callable[[int], None]], None],
    resumable: bool,
) -> Manifest:
    """Store the passages of `source` (None: live), `make` the index of them, and write the manifest."""
    parameters = build_parameters(retriever, options or {})
    identity = identity_of(retriever, builder)
    plan = {"retriever": retriever, "options": parameters, "identity": identity}
    report = progress or (lambda stage, done, total: None)
    corpus, corpus_digest, count = "", "", 0
    in_directory = resumable_directory if resumable else atomic_directory
    plugin = manager.find("retriever", retriever)
    with in_directory(out, replace=_REPLACEABLE if overwrite else None) as directory:
        if resumable:
            _resume(directory, plan, overwrite)
        if source is not None:
            corpus, passages = source
            digest = CorpusDigest()
            store = keep_passages(digest.of(passages), directory, lambda done: report("reading", done, None))
            corpus_digest, count = digest.hexdigest(), len(store)
            if resumable:
                _resume(directory, {**plan, "corpus_digest": corpus_digest}, overwrite, keep=FOLDER)
            with manager.named_errors(plugin):
                make(store, directory, lambda done: report("indexing", done, count))
        else:
            with manager.named_errors(plugin):
                build_live(builder, directory, lambda done: None)
        files = sizes_of(directory, leave_out=(MANIFEST, NOTE))
        manifest = make_manifest(
            retriever, parameters, identity, corpus, corpus_digest, count, files, checksums(directory, files)
        )
        manifest.write(directory)
    (out / NOTE).unlink(missing_ok=True)
    return manifest


def _resume(directory: Path, plan: Mapping[str, Any], overwrite: bool, keep: str = "") -> None:
    """Go on with the build of `plan` that was interrupted in `directory`, if there is one, and note the plan.

    What an interrupted build of anything else left is removed with `overwrite`, except the folder `keep`.
    Without, UserError is raised.
    """
    path, note = directory / NOTE, dict[str, Any]()
    if path.is_file():
        note = read_json(path, dict[str, Any])
        same = all(note.get(name, value) == value for name, value in plan.items())
        if not same and not overwrite:
            raise UserError(
                f"{directory} has an unfinished index of something else, by {note.get('retriever')}",
                hint="finish that one, remove it, or add --overwrite to start over",
            )
    else:
        same = not any(directory.iterdir())
        if not same:  # an index, if the process died while it was replaced
            _REPLACEABLE(directory)
    if same:
        write_json(path, {"format": FORMAT, **note, **plan})
        return
    for entry in directory.iterdir():
        if entry.name == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    write_json(path, {"format": FORMAT, **plan})


def build_parameters(retriever: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that affect the index, with defaults, without those marked `runtime`."""
    model = manager.options_model("retriever", retriever)
    if model is None:
        return {}
    parameters = validated(f"retriever.{retriever}", model, options)
    return parameters.model_dump(mode="json", exclude=runtime_options(model))


def check_corpus(directory: Path | str, corpus: Path | str) -> Manifest:
    """The manifest of the index. Raises CheckFailed unless it was built from `corpus`."""
    manifest = read_index_manifest(directory)
    digest = CorpusDigest()
    count = sum(1 for _ in digest.of(read_corpus(Path(corpus))))
    if digest.hexdigest() != manifest.corpus_digest:
        raise CheckFailed(
            f"{directory} was not built from {corpus}: expected corpus digest {manifest.corpus_digest[:12]} "
            f"({manifest.passages:,} passages), found {digest.hexdigest()[:12]} ({count:,})"
        )
    return manifest


def _source(corpus: Path | str | Iterable[Passage]) -> tuple[str, Iterator[Passage]]:
    """The name of the corpus for the manifest, without directories, and its passages."""
    if isinstance(corpus, Path | str):
        return Path(corpus).name, read_corpus(Path(corpus))
    return "", iter(corpus)


def make_manifest(
    retriever: str,
    parameters: dict[str, Any],
    identity: dict[str, str],
    corpus: str = "",
    corpus_digest: str = "",
    passages: int = 0,
    files: Mapping[str, int] | None = None,
    sums: Mapping[str, str] | None = None,
) -> Manifest:
    """The manifest of an index with these parameters."""
    entry = manager.find("retriever", retriever)
    return Manifest(
        retriever=retriever,
        options=parameters,
        passages=passages,
        corpus=corpus,
        corpus_digest=corpus_digest,
        digest=index_digest(corpus_digest, retriever, parameters, identity),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        srl_version=__version__,
        retriever_version=f"{entry.package} {entry.version}",
        identity=identity,
        files=dict(files or {}),
        checksums=dict(sums or {}),
    )
