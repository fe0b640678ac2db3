"""Building an index: store the passages, let the retriever index them, write the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from srl import __version__
from srl.data.corpus import read_corpus
from srl.errors import CheckFailed, UserError
from srl.index.build_directory import BESIDES, build_directory
from srl.index.manifest import Manifest, index_digest, mark_files, read_index_manifest
from srl.index.passages import CorpusDigest, PassageStore, keep_passages
from srl.index.retriever import RetrieverBase, build_live, identity_of, load_retriever
from srl.index.verification import record
from srl.input_files import input_name
from srl.manifests import checksums
from srl.plugins import manager
from srl.plugins.options import runtime_options, validated
from srl.trajectory import Passage

Progress = Callable[[str, int, int | None], None]
"""Called with the current stage, the passages done, and their number (None: not known yet)."""


def build_index(
    corpus: Path | str | Iterable[Passage] | None,
    out: Path | str,
    retriever: str = "bm25",
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Build the index of `corpus` (a file, or passages) at `out`, which appears whole or not at all.

    A `live` retriever takes no corpus; its `build`, if it has one, gets None. A `resumable` one works in
    `<out>.building`, where the next call resumes after a kill. An existing index is replaced only with
    `overwrite`, any other directory never.

    Raises UserError for an unknown retriever or option, a bad line of the corpus, and an `out` that exists.
    """
    builder = load_retriever(retriever, options)
    if builder.live:
        if corpus is not None:
            raise UserError(f"{retriever} searches a live source and takes no corpus; leave --corpus out")
        return _build(builder, retriever, options, Path(out), None, progress, overwrite, None)
    if corpus is None:
        raise UserError(f"{retriever} needs a corpus to index; type: srl index build --corpus FILE --out DIR")
    return _build(builder, retriever, options, Path(out), _source(corpus), progress, overwrite, builder.build)


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
    import_files, passages_in = builder.adopt, builder.passages_in
    if import_files is None:
        raise UserError(f"{retriever} cannot import an index; type: srl index build --corpus FILE")
    if not source.exists():
        raise UserError(f"no file or directory {source} to import")
    if corpus is not None:
        passages = _source(corpus)
    elif passages_in is not None:
        passages = (source.name, passages_in(source))
    else:
        raise UserError(f"{source} has no passages; add --corpus FILE, the corpus that it was built from")

    def adopt(store: PassageStore, directory: Path, report: Callable[[int], None]) -> None:
        import_files(source, store, directory, report)

    return _build(builder, retriever, options, Path(out), passages, progress, overwrite, adopt)


def _build(
    builder: RetrieverBase,
    retriever: str,
    options: Mapping[str, Any] | None,
    out: Path,
    source: tuple[str, Iterator[Passage]] | None,
    progress: Progress | None,
    overwrite: bool,
    make: Callable[[PassageStore, Path, Callable[[int], None]], None] | None,
) -> Manifest:
    parameters = build_parameters(retriever, dict(options or {}))
    identity = identity_of(retriever, builder)
    report, digest, count = progress or _silent, CorpusDigest(), 0
    plan = {"retriever": retriever, "options": parameters, "identity": identity}
    resumable = builder.resumable and make == builder.build
    with build_directory(out, plan, resumable, overwrite) as place:
        if source is not None and make is not None:
            passages = digest.of(source[1])
            store = keep_passages(passages, place.directory, lambda done: report("reading", done, None))
            place.check_corpus(digest.hexdigest())
            count = len(store)
            if not place.finished:
                with manager.named_errors(manager.find("retriever", retriever)):
                    make(store, place.directory, lambda done: report("indexing", done, count))
        else:
            with manager.named_errors(manager.find("retriever", retriever)):
                build_live(builder, place.directory, lambda done: None)
        of_corpus = (source[0], digest.hexdigest(), count) if source else ("", "", 0)
        files = mark_files(place.directory, leave_out=BESIDES)
        sums = checksums(place.directory, files)
        manifest = make_manifest(retriever, parameters, identity, *of_corpus, files, sums)
        manifest.write(place.directory)
        record(place.directory, manifest)
    return manifest


def build_parameters(retriever: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that affect the index, with defaults, without those marked `runtime`."""
    model = manager.options_model("retriever", retriever)
    if model is None:
        return {}
    checked = validated(f"retriever.{retriever}", model, options)
    return checked.model_dump(mode="json", exclude=runtime_options(model))


def check_corpus(directory: Path | str, corpus: Path | str) -> Manifest:
    """The manifest of the index. Raises CheckFailed unless it was built from `corpus`."""
    manifest = read_index_manifest(directory)
    digest = CorpusDigest()
    count = sum(1 for _ in digest.of(read_corpus(Path(corpus))))
    if digest.hexdigest() != manifest.corpus_digest:
        raise CheckFailed(
            f"{directory} was not built from {corpus}: expected corpus digest {manifest.corpus_digest[:12]} "
            f"({manifest.passages:,} passages), found {digest.hexdigest()[:12]} ({count:,}); "
            f"type: srl index build --corpus {corpus} --out DIR"
        )
    return manifest


def _source(corpus: Path | str | Iterable[Passage]) -> tuple[str, Iterator[Passage]]:
    """The name of the corpus for the manifest, without directories, and its passages."""
    if isinstance(corpus, Path | str):
        return input_name(Path(corpus)), read_corpus(Path(corpus))
    return "", iter(corpus)


def make_manifest(
    retriever: str,
    parameters: dict[str, Any],
    identity: dict[str, str],
    corpus: str = "",
    corpus_digest: str = "",
    passages: int = 0,
    files: Mapping[str, str] | None = None,
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
        files=files or {},
        checksums=sums or {},
        identity=identity,
    )


def _silent(stage: str, done: int, total: int | None) -> None:
    """Report no progress."""
