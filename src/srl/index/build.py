"""Building an index: store the passages, let the retriever index them, write down what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from srl import __version__
from srl.data.corpus import read_corpus
from srl.errors import CheckFailed, UserError
from srl.files import MANIFEST, atomic_directory, read_manifest
from srl.index.manifest import KIND, Manifest, index_digest, mark_files, read_index_manifest
from srl.index.passages import CorpusDigest, keep_passages
from srl.plugins import manager
from srl.plugins.options import validated
from srl.trajectory import Passage

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many passages are done, and of how many (None: not known yet)."""


def build_index(
    corpus: Path | str | Iterable[Passage],
    out: Path | str,
    retriever: str = "bm25",
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Build the index of `corpus` (a file, or passages) at `out`, which appears whole or not at all.

    An existing index is replaced with `overwrite`; a directory that is no index never is. Raises
    UserError for an unknown retriever or option, a bad line of the corpus, an `out` that is taken.
    """
    out = Path(out)
    options = dict(options or {})
    engine: Any = manager.load("retriever", retriever, options)
    parameters = build_parameters(retriever, options)
    replace = _may_replace(out, overwrite)
    report = progress or _silent
    with atomic_directory(out, overwrite=replace) as directory:
        source, passages = _source(corpus)
        digest = CorpusDigest()
        store = keep_passages(digest.of(passages), directory, lambda done: report("reading", done, None))
        engine.build(store, directory, lambda done: report("indexing", done, len(store)))
        manifest = _manifest(retriever, parameters, source, digest.hexdigest(), len(store), directory)
        manifest.write(directory)
    return manifest


def build_parameters(retriever: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options that shape the index, defaults too; those marked `runtime` are left out."""
    model = manager.options_model("retriever", retriever)
    if model is None:
        return {}
    checked = validated(f"retriever.{retriever}", model, options)
    return checked.model_dump(mode="json", exclude=runtime_options(model))


def runtime_options(model: type[BaseModel]) -> set[str]:
    """The options that belong to the machine (`json_schema_extra={"runtime": True}`), not to the index."""
    extras = {name: field.json_schema_extra for name, field in model.model_fields.items()}
    return {name for name, extra in extras.items() if isinstance(extra, Mapping) and extra.get("runtime")}


def check_corpus(directory: Path | str, corpus: Path | str) -> Manifest:
    """The manifest of the index, if it was built from `corpus`. Raises CheckFailed if not."""
    manifest = read_index_manifest(directory)
    digest = CorpusDigest()
    count = sum(1 for _ in digest.of(read_corpus(Path(corpus))))
    if digest.hexdigest() != manifest.corpus_digest:
        raise CheckFailed(
            f"{directory} was not built from {corpus}: it holds {manifest.passages:,} passages "
            f"(corpus digest {manifest.corpus_digest[:12]}), the file {count:,} ({digest.hexdigest()[:12]}); "
            f"type: srl index build --corpus {corpus} --out DIR"
        )
    return manifest


def _source(corpus: Path | str | Iterable[Passage]) -> tuple[str, Iterator[Passage]]:
    """A name for the manifest (no directories: those say nothing elsewhere) and the passages."""
    if isinstance(corpus, Path | str):
        return Path(corpus).name, read_corpus(Path(corpus))
    return "", iter(corpus)


def _may_replace(out: Path, overwrite: bool) -> bool:
    """Whether something at `out` is replaced. Raises UserError when it may not be."""
    if out.is_dir() and not any(out.iterdir()):
        return True
    if not out.exists():
        return False
    if not (out / MANIFEST).is_file():
        raise UserError(f"{out} exists and is not an index; choose another --out, or remove it first")
    passages = read_manifest(out, KIND).get("passages")
    if not overwrite:
        raise UserError(
            f"{out} exists already, an index of {passages} passages; "
            "add --force to replace it, or choose another --out"
        )
    return True


def _manifest(
    retriever: str,
    parameters: dict[str, Any],
    source: str,
    corpus_digest: str,
    passages: int,
    directory: Path,
) -> Manifest:
    entry = manager.find("retriever", retriever)
    return Manifest(
        retriever=retriever,
        options=parameters,
        passages=passages,
        corpus=source,
        corpus_digest=corpus_digest,
        digest=index_digest(corpus_digest, retriever, parameters),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        srl_version=__version__,
        retriever_version=f"{entry.package} {entry.version}",
        files=mark_files(directory),
    )


def _silent(stage: str, done: int, total: int | None) -> None:
    """No progress to report to anybody."""
