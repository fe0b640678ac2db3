"""Cassettes: searches recorded in a file and replayed from it, so that a run repeats with no server or index.

The file is JSON lines; each line is complete as soon as it is written. The first is the header: format,
`topk`, the digest of each retriever's index. A line with `passage` numbers a passage, once. A line with
`query` is a search and its outcome, with `[passage, score]` for each hit; fields with default values are left
out. A line with `session` starts what a resumed run adds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

from srl.errors import UserError, parsing
from srl.files import FORMAT, check_format, digest_text, lock
from srl.index import Index
from srl.serve.named_retrievers import aclose, connect, digest_of, indexes_of
from srl.trajectory import Hit, Passage, Search, SearchStatus, SearchTool, current_episode

KIND = "search cassette"

_DEFAULTS = {
    one.name: one.default
    for one in fields(Search)
    if one.name not in ("hits", "turn") and one.default is not MISSING
}
"""Fields of a search that a line has only if they differ from these; `turn` is set by the episode."""
_STATUSES = get_args(SearchStatus)
_RECORD = "record one: --set 'search.cassette=record FILE'"


class MissingFromCassette(UserError):  # noqa: N818 - named in the public interface
    """A query that was not asked when the cassette was recorded."""


@dataclass(frozen=True, slots=True)
class CassetteHeader:
    """The first line of a cassette.

    `digests` has the index digest of each retriever, "" for the default one. `retrievers` are the names of
    the others; None if the recorded search tool took no names.
    """

    topk: int | None
    digests: Mapping[str, str]
    retrievers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RecordedSearch:
    """One search; `session` is 1 for the run that began the recording, one more after each resume."""

    episode: str
    session: int
    search: Search


@dataclass(slots=True)
class Cassette:
    """The contents of a cassette. `length` is the size of its complete lines in bytes."""

    header: CassetteHeader
    searches: list[RecordedSearch] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    sessions: int = 1
    length: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError, ValueError, IndexError or OverflowError for an invalid line."""
        if "query" in line:
            episode = str(line.get("episode", ""))
            self.searches.append(RecordedSearch(episode, self.sessions, self._search(line)))
        elif "passage" in line:
            if line["passage"] != len(self.passages):
                raise ValueError("a passage is out of order")
            self.passages.append(Passage(_text(line["id"]), _text(line["contents"])))
        else:
            self.sessions = int(line["session"])

    def _search(self, line: Mapping[str, Any]) -> Search:
        hits = tuple(Hit(self._passage(number), float(score)) for number, score in line.get("hits", ()))
        digest = self.header.digests.get(line.get("retriever", ""), "")
        given = {name: line[name] for name in _DEFAULTS if name in line}
        for name, value in given.items():
            if not isinstance(value, type(_DEFAULTS[name])):
                raise TypeError(name)
        if given.get("status", "ok") not in _STATUSES:
            raise ValueError("an unknown status")
        return Search(_text(line["query"]), hits, **{"index_digest": digest, **given})

    def _passage(self, number: int) -> Passage:
        if number < 0:
            raise IndexError(number)
        return self.passages[number]


def read_cassette(path: Path) -> Cassette | None:
    """The cassette at `path`; None if it has no complete line yet. An incomplete last line is left out.

    Raises UserError if the file is not a cassette, has a newer format, or is damaged.
    """
    cassette: Cassette | None = None
    for number, data in enumerate(_complete_lines(path), start=1):
        try:
            line = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            line = None
        if cassette is None:
            cassette = Cassette(_header(path, line))
        else:
            _add(cassette, line, f"{path}:{number}")
        cassette.length += len(data)
    return cassette


def _complete_lines(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        yield from (line for line in file if line.endswith(b"\n"))


def _header(path: Path, line: Any) -> CassetteHeader:
    if not isinstance(line, dict) or line.get("kind") != KIND:
        raise UserError(f"{path} is not a search cassette; {_RECORD}")
    check_format(path, line.get("format"))
    with parsing(f"{path}:1: the cassette is damaged"):
        names = line["retrievers"]
        return CassetteHeader(line["topk"], dict(line["digests"]), None if names is None else tuple(names))


def _add(cassette: Cassette, line: Any, where: str) -> None:
    with parsing(f"{where}: the cassette is damaged"):
        cassette.add(line)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected text")
    return value


class CassetteWriter:
    """Appends searches to a cassette. Each is flushed before `write` returns, so a kill loses none.

    Creates the file. With `append` it may exist: an incomplete last line is cut off. One process at a time.
    Raises UserError if the file cannot be written, exists (without `append`), or has other searches.
    """

    def __init__(self, path: Path, header: CassetteHeader, append: bool = False) -> None:
        self._path, self._digests = path, dict(header.digests)
        self._numbers: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._refuse_if(path.exists() and not append)
        try:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
                cassette = read_cassette(path)
                self._refuse_if(cassette is not None and not append)
                self._begin(header, cassette)
        except UserError:
            self.close()
            raise

    def _refuse_if(self, exists: bool) -> None:
        if exists:
            raise UserError(
                f"the cassette {self._path} exists already; choose another name, or remove it first"
            )

    def write(self, search: Search, episode: str) -> None:
        """Append one search. Raises UserError if the disk is full."""
        hits = [[self._number(hit.passage), float(hit.score)] for hit in search.hits]
        line: dict[str, Any] = {"query": search.query}
        usual = {**_DEFAULTS, "index_digest": self._digests.get(search.retriever, "")}
        line |= {name: value for name in usual if (value := getattr(search, name)) != usual[name]}
        if hits:
            line["hits"] = hits
        self._put({"episode": episode, **line} if episode else line)

    def close(self) -> None:
        """Sync the file to disk and close it. The next `write` opens it again."""
        if self._file is not None:
            with self._writing(), self._file as file:
                os.fsync(file.fileno())
        self._file = None

    def _begin(self, header: CassetteHeader, cassette: Cassette | None) -> None:
        assert self._file is not None
        self._file.truncate(cassette.length if cassette else 0)
        if cassette is None:
            self._put({"format": FORMAT, "kind": KIND, **_header_line(header)})
            return
        if why := _difference(cassette.header, header):
            raise UserError(f"the cassette {self._path} can only be continued with the same searches: {why}")
        self._digests = dict(cassette.header.digests)
        self._numbers = {_key(passage): number for number, passage in enumerate(cassette.passages)}
        self._put({"session": cassette.sessions + 1})

    def _number(self, passage: Passage) -> int:
        key = _key(passage)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._put({"passage": number, "id": passage.id, "contents": passage.contents})
        return number

    def _put(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n"
        with self._writing():
            file = self._file or self._open()
            file.write(text.encode("utf-8", "surrogatepass"))
            file.flush()

    def _open(self) -> BinaryIO:
        self._file = open(self._path, "ab")  # noqa: SIM115 - open until `close`
        taken = f"another run is recording to the cassette {self._path}; choose another name"
        lock(self._file, taken)
        return self._file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"the cassette {self._path} cannot be written: {error.strerror}") from error


def _key(passage: Passage) -> str:
    return digest_text(passage.id, passage.contents)


def _header_line(header: CassetteHeader) -> dict[str, Any]:
    from srl import __version__

    return {
        "srl": __version__,
        "topk": header.topk,
        "digests": header.digests,
        "retrievers": header.retrievers,
    }


def _difference(before: CassetteHeader, now: CassetteHeader) -> str:
    """Why the searches of two headers differ; empty if they do not."""
    if before.topk != now.topk:
        return f"it was recorded with topk={before.topk}, not {now.topk}"
    for retriever, digest in now.digests.items():
        known = before.digests.get(retriever, "")
        if digest and known and digest != known:
            named = f" of the retriever {retriever!r}" if retriever else ""
            return f"expected the index{named} with digest {known[:12]}, found {digest[:12]}"
    return ""


class Recorder:
    """A search tool that passes queries on to another one and records every outcome, faults too.

    With `append`, recording continues in an existing cassette, as for a resumed run; without, an existing
    file is refused.
    """

    retrievers: Sequence[str]
    """The names of the retrievers; only set if the search tool has some."""

    def __init__(
        self, search: SearchTool, path: Path | str, *, topk: int | None = None, append: bool = False
    ) -> None:
        self._search: Any = search
        names = getattr(search, "retrievers", None)
        if names is not None:
            names = self.retrievers = tuple(names)
        self._cassette = CassetteWriter(Path(path), CassetteHeader(topk, self.digests, names), append)

    @property
    def index_digest(self) -> str:
        return digest_of(self._search)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each retriever's index by its name, "" for the default one."""
        return dict(getattr(self._search, "digests", None) or {"": self.index_digest})

    @property
    def indexes(self) -> tuple[Index, ...] | None:
        """The indexes of the recorded search tool, as `indexes_of` has them."""
        return indexes_of(self._search)

    async def search(self, query: str, retriever: str = "") -> Search:
        """The outcome of one query, recorded. Raises UserError if the cassette cannot be written."""
        named = (retriever,) if retriever else ()
        found: Search = await self._search.search(query, *named)
        self._cassette.write(replace(found, query=query, retriever=retriever), current_episode.get())
        return found

    async def connect(self) -> None:
        """Connect the recorded search tool."""
        await connect(self._search)

    async def aclose(self) -> None:
        """Close the cassette and the connections; the next search opens them again."""
        self._cassette.close()
        await aclose(self._search)


class Replay:
    """A search tool that answers from a cassette.

    An episode gets the outcomes that it got when recorded, in their order. An episode that is not in the
    cassette, or that asks something new, gets what others got for the same query: the outcomes in the order
    recorded, then the last one again and again. Raises UserError if the file is not a cassette, or was
    recorded with another `topk`.
    """

    retrievers: Sequence[str]
    """The names of the retrievers; only set if the recorded search tool had some."""

    def __init__(self, path: Path | str, *, topk: int | None = None) -> None:
        self._path = Path(path)
        cassette = _load(self._path)
        recorded = cassette.header.topk
        if None not in (topk, recorded) and topk != recorded:
            raise UserError(
                f"the cassette {path} was recorded with topk={recorded}, not {topk}; "
                f"type: --set search.topk={recorded}"
            )
        if cassette.header.retrievers is not None:
            self.retrievers = cassette.header.retrievers
        self.digests = _digests(cassette)
        self._outcomes = _outcomes(cassette.searches)
        self._played: Counter[tuple[str, str, str]] = Counter()

    @property
    def index_digest(self) -> str:
        return self.digests.get("", "")

    async def search(self, query: str, retriever: str = "") -> Search:
        """The recorded outcome. Raises MissingFromCassette for a query that was not recorded."""
        await asyncio.sleep(0)
        for episode in (current_episode.get(), ""):
            key = (episode, retriever, query)
            if outcomes := self._outcomes.get(key):
                found = outcomes[min(self._played[key], len(outcomes) - 1)]
                self._played[key] += 1
                return found
        asked = f"{_shortened(query)}{f' from the retriever {retriever!r}' if retriever else ''}"
        raise MissingFromCassette(
            f"the cassette {self._path} has no answer to {asked}: the recorded run did not ask it; "
            "record again: --set 'search.cassette=record FILE'"
        )

    async def aclose(self) -> None:
        """Does nothing."""


def _load(path: Path) -> Cassette:
    if not path.exists():
        raise UserError(f"there is no cassette {path}; {_RECORD.replace('FILE', str(path))}")
    if (cassette := read_cassette(path)) is None:
        raise UserError(f"the cassette {path} is empty; record it again")
    return cassette


def _digests(cassette: Cassette) -> dict[str, str]:
    """The index digest of each retriever: the header's, or else that of its first outcome that has one."""
    digests = dict(cassette.header.digests)
    for recorded in cassette.searches:
        retriever = recorded.search.retriever
        if retriever in digests:
            digests[retriever] = digests[retriever] or recorded.search.index_digest
    return digests


def _outcomes(searches: Sequence[RecordedSearch]) -> dict[tuple[str, str, str], list[Search]]:
    """Outcomes by (episode, retriever, query), and those of all episodes by ("", retriever, query).

    Of an episode that ran again after a resume, only the outcomes of its last run count.
    """
    last = {recorded.episode: recorded.session for recorded in searches}
    found: dict[tuple[str, str, str], list[Search]] = {}
    for recorded in searches:
        search = recorded.search
        found.setdefault(("", search.retriever, search.query), []).append(search)
        if recorded.episode and recorded.session == last[recorded.episode]:
            found.setdefault((recorded.episode, search.retriever, search.query), []).append(search)
    return found


def _shortened(query: str, length: int = 80) -> str:
    """The query quoted on one line; the middle of a long one is left out."""
    if len(query) > length:
        query = f"{query[: length // 2]} … {query[-length // 2 :]}"
    return repr(query)
