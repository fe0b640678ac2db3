"""What answers the searches of a run: servers, an index, further retrievers by name, or a cassette."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from srl import process
from srl.config import Config
from srl.data.corpus import digest_corpus
from srl.errors import UserError
from srl.files import check_input, digest_text
from srl.index import (
    build_index,
    check_corpus,
    live_index,
    load_retriever,
    open_index,
    read_index_manifest,
)
from srl.index.build import build_parameters
from srl.index.open import check_may_import
from srl.index.retriever import identity_of
from srl.plugins import manager
from srl.plugins.options import runtime_options
from srl.progress import Note, counted_stages
from srl.rollout.documents import OPENERS
from srl.rollout.protocol import Protocol
from srl.serve.cassette import Recorder, Replay
from srl.serve.client import HttpSearch
from srl.serve.in_process import LocalSearch
from srl.serve.named_retrievers import NamedRetrievers, aclose, connect, digest_of, lacks_documents
from srl.train.make_missing import NOTHING_TO_SEARCH, check_corpus_exists, make_if_missing
from srl.trajectory import SearchTool
from srl.workspace import Workspace


def load_search(config: Config, workspace: Workspace, note: Note) -> SearchTool | None:
    """The search tool of a run: a server, an index in this process, several retrievers, a cassette, or none.

    Recording appends to a cassette that exists; `new_cassette` creates one. Raises UserError if a server does
    not answer, or if the index is not `search.digest`.
    """
    if not config.rollout.search:
        return None
    section = config.search
    mode, file = section.cassette_use or ("", "")
    if mode == "replay":
        search: SearchTool = Replay(file, topk=section.topk)
        if missing := sorted({*getattr(search, "retrievers", ())} - section.retrievers.keys()):
            raise UserError(
                f"{file} was recorded with the retrievers {', '.join(missing)}, which are not set",
                key="search.retrievers", hint="set them as in the run that recorded it",
            )  # fmt: skip
    else:
        search = _default(config, workspace, note)
        if retrievers := {name: _named(config, name) for name in section.retrievers}:
            search = NamedRetrievers(search, retrievers)
    takes_ids = config.rollout.protocol == "native" and not OPENERS.isdisjoint(config.rollout.tools)
    process.run_async(_reach(search, takes_ids))
    if section.digest is not None and not digest_of(search).startswith(section.digest):
        raise UserError(
            f"search.digest: expected digest {section.digest}, found {digest_of(search) or 'none'}",
            key="search.digest",
            hint="search the expected index, or set search.digest=null",
        )
    return Recorder(search, file, topk=section.topk, append=True) if mode == "record" else search


def _default(config: Config, workspace: Workspace, note: Note) -> SearchTool:
    """The retriever of `search.url`, `search.index` or `data.corpus`.

    Of its configured options those count that may differ from the build's, such as threads and devices.
    """
    if config.search.url is not None:
        return _server(config, config.search.url, config.search.topk, config.search.digest or "")
    path = find_or_build_index(config, workspace, note)
    manifest = read_index_manifest(path)
    check_may_import(path, manifest)
    model = manager.options_model("retriever", manifest.retriever)
    names = runtime_options(model) if model else set()
    options = config.retriever.options(manifest.retriever)
    index = open_index(path, {name: value for name, value in options.items() if name in names})
    if config.search.index is not None and config.data.corpus is not None and not index.live:
        check_corpus(path, Path(config.data.corpus))
    return LocalSearch(index, config.search.topk)


def find_or_build_index(config: Config, workspace: Workspace, note: Note) -> Path:
    """The index directory to search: the one configured, or that of the corpus, built first if missing."""
    if config.search.index is not None:
        return Path(config.search.index)
    if config.data.corpus is None:
        raise UserError(NOTHING_TO_SEARCH)
    corpus, name = Path(config.data.corpus), config.retriever.name
    check_corpus_exists(corpus)
    if not corpus.is_dir():
        check_input(corpus)
    options = config.retriever.options(name)
    identity = identity_of(name, load_retriever(name, options))
    shaping = json.dumps([build_parameters(name, options), identity], sort_keys=True)
    code = [manager.find("retriever", name).version] if manager.is_import_path(name) else []
    key = digest_text(digest_corpus(corpus), name, shaping, *code)[:8]

    def build(path: Path) -> None:
        note(f"building the index {path}")
        with counted_stages("passages") as progress:
            build_index(corpus, path, name, options, progress)

    return make_if_missing(workspace.indexes / f"{corpus.resolve().parent.name}-{name}-{key}", build)


def _named(config: Config, name: str) -> SearchTool:
    """The retriever `search.retrievers.<name>`."""
    retriever = config.search.retrievers[name]
    topk = retriever.topk or config.search.topk
    if retriever.url is not None:
        return _server(config, retriever.url, topk)
    assert retriever.index or retriever.retriever, "the configuration is checked: one of the three is there"
    index = (
        open_index(retriever.index, retriever.options)
        if retriever.index is not None
        else live_index(str(retriever.retriever), retriever.options)
    )
    return LocalSearch(index, topk)


def _server(config: Config, url: tuple[str, ...], topk: int, digest: str = "") -> HttpSearch:
    settings = config.search
    return HttpSearch(
        url, topk, digest=digest, timeout_s=settings.timeout_s, retries=settings.retries,
    )  # fmt: skip


async def _reach(search: SearchTool, needs_documents: bool) -> None:
    """Ask the servers for the digests of their indexes. Raises UserError if a server does not answer, or has
    no documents where those are needed."""
    try:
        await connect(search)
        if needs_documents and (why := await lacks_documents(search)):
            what = f"open and find need whole documents: {why}"
            raise UserError(what, key="rollout.tools", hint="set rollout.tools=[search]")
    finally:
        await aclose(search)


@contextmanager
def new_cassette(config: Config) -> Iterator[None]:
    """Create the cassette that `config` records to, empty; remove it if the body fails.

    It is created exclusively: of two runs that start at the same time, one gets it. Raises UserError.
    """
    mode, file = config.search.cassette_use or ("", "")
    if mode != "record" or not config.rollout.search:
        yield
        return
    cassette = Path(file)
    try:
        cassette.parent.mkdir(parents=True, exist_ok=True)
        cassette.open("x").close()
    except OSError as error:
        why = "exists already" if cassette.exists() else f"cannot be created: {error.strerror}"
        hint = "name another file, or remove it first"
        raise UserError(f"the cassette {cassette} {why}", key="search.cassette", hint=hint) from error
    try:
        yield
    except BaseException:
        cassette.unlink(missing_ok=True)
        raise


def index_digests(search: SearchTool | None) -> dict[str, str]:
    """The digest of each retriever's index by the retriever's name, "" for the default one; an empty digest
    where a server reports none, and nothing if search is off."""
    return {} if search is None else {"": digest_of(search), **getattr(search, "digests", {})}


def as_inputs(digests: Mapping[str, str], protocol: Protocol | None = None) -> dict[str, str]:
    """The digests of indexes, and of the texts around results, under the names of `RunRecord.inputs`."""
    inputs = {f"index of {name}" if name else "index": digest for name, digest in digests.items()}
    return inputs | ({"glue": protocol.card["glue"]} if protocol and "glue" in protocol.card else {})
