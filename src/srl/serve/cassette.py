"""Searches recorded on a cassette, and answered from it: a run repeats with no server and no index."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, get_args

from srl.errors import UserError
from srl.files import FORMAT, check_format, digest_text
from srl.renamed import current_fields
from srl.trajectory import Hit, Passage, Search, SearchStatus, SearchTool, current_episode


class MissingFromCassette(UserError):  # noqa: N818 - named in the public interface
    """A query that was not asked when the cassette was recorded."""


class Recorder:
    """Passes queries on and writes every outcome, faults too, to a cassette.

    `append` goes on with a cassette that is there, as a resumed run does; without it such a file is refused.
    """

    retrievers: Sequence[str]
    """The names of the retrievers; only where the search behind it has some."""

    def __init__(
        self, search: SearchTool, path: Path | str, *, topk: int | None = None, append: bool = False
    ) -> None:
        self._search: Any = search
        retrievers = getattr(search, "retrievers", None)
        if retrievers is not None:
            self.retrievers = tuple(retrievers)
        names = None if retrievers is None else tuple(retrievers)
        self._cassette = CassetteWriter(Path(path), CassetteHeader(topk, self.digests, names), append)

    @property
    def index_digest(self) -> str:
        return str(getattr(self._search, "index_digest", ""))

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each retriever's index by its name, "" for the default one."""
        return dict(getattr(self._search, "digests", None) or {"": self.index_digest})

    async def search(self, query: str, retriever: str = "") -> Search:
        """The outcome of one query, recorded. Raises UserError where the cassette cannot be written."""
        found: Search = await (
            self._search.search(query, retriever) if retriever else self._search.search(query)
        )
        self._cassette.write(replace(found, query=query, retriever=retriever), current_episode.get())
        return found

    async def connect(self) -> None:
        """As the search behind it does."""
        if (connect := getattr(self._search, "connect", None)) is not None:
            await connect()

    async def aclose(self) -> None:
        """Close cassette and connections; another search opens them again."""
        self._cassette.close()
        if (close := getattr(self._search, "aclose", None)) is not None:
            await close()


class Replay:
    """Answers queries from a cassette as they were answered when it was recorded.

    An episode gets the outcomes that it got then, in their order. An episode that the cassette does not
    know, or that asks something new, gets what others got for the query: the outcomes in the order they
    were recorded, the last one again and again.
    Raises UserError for what is no cassette, and where it was recorded with another `topk`.
    """

    retrievers: Sequence[str]
    """The names of the retrievers; only where the recorded search had some."""

    def __init__(self, path: Path | str, *, topk: int | None = None) -> None:
        self._path = Path(path)
        cassette = _load(self._path)
        if None not in (topk, cassette.header.topk) and topk != cassette.header.topk:
            raise UserError(
                f"the cassette {path} was recorded with topk={cassette.header.topk}, not {topk}; set that"
            )
        if cassette.header.retrievers is not None:
            self.retrievers = cassette.header.retrievers
        self.digests = _digests(cassette)
        self._outcomes = _by_key(cassette.entries)
        self._played: Counter[tuple[str, str, str]] = Counter()

    @property
    def index_digest(self) -> str:
        return self.digests.get("", "")

    async def search(self, query: str, retriever: str = "") -> Search:
        """What came of the query then. Raises MissingFromCassette for one that was not asked."""
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
        """Nothing to close; as `HttpSearch.aclose`."""


def _load(path: Path) -> Cassette:
    if not path.exists():
        raise UserError(f"there is no cassette {path}; record one: --set 'search.cassette=record {path}'")
    if (cassette := read_cassette(path)) is None:
        raise UserError(f"nothing is on the cassette {path}; record it again")
    return cassette


def _digests(cassette: Cassette) -> dict[str, str]:
    """Of each retriever, as the header says, or else the first of its outcomes that says one."""
    digests = dict(cassette.header.digests)
    for entry in cassette.entries:
        retriever = entry.search.retriever
        if retriever in digests:
            digests[retriever] = digests[retriever] or entry.search.index_digest
    return digests


def _by_key(entries: Sequence[RecordedSearch]) -> dict[tuple[str, str, str], list[Search]]:
    """The outcomes by (episode, retriever, query), and of all episodes by ("", retriever, query).

    An episode that was run again when the recording was resumed has what it got the last time.
    """
    last = {entry.episode: entry.session for entry in entries}
    found: dict[tuple[str, str, str], list[Search]] = {}
    for entry in entries:
        search = entry.search
        found.setdefault(("", search.retriever, search.query), []).append(search)
        if entry.episode and entry.session == last[entry.episode]:
            found.setdefault((entry.episode, search.retriever, search.query), []).append(search)
    return found


def _shortened(query: str, length: int = 80) -> str:
    """The query in quotation marks, on one line, with its middle left out where it is long."""
    if len(query) > length:
        query = f"{query[: length // 2]} … {query[-length // 2 :]}"
    return repr(query)


log = logging.getLogger(__name__)

KIND = "search tape"

_PLAIN = {
    one.name: one.default
    for one in fields(Search)
    if one.name not in ("hits", "turn") and one.default is not MISSING
}
"""The fields of a search that a line says only where they differ from these; the episode sets `turn`."""
_STATUSES = get_args(SearchStatus)


@dataclass(frozen=True, slots=True)
class CassetteHeader:
    """What a cassette says of itself: `digests` by retriever, "" for the default one; `retrievers` are None
    where the search knew only one."""

    topk: int | None
    digests: Mapping[str, str]
    retrievers: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class RecordedSearch:
    """One recorded search; `session` counts how often the recording was begun."""

    episode: str
    session: int
    search: Search


@dataclass(slots=True)
class Cassette:
    """What is on a cassette. `length` is the bytes of its complete lines."""

    header: CassetteHeader
    entries: list[RecordedSearch] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    sessions: int = 1
    length: int = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Raises KeyError, TypeError, ValueError, IndexError or OverflowError for a line that is none."""
        if "query" in line:
            self.entries.append(
                RecordedSearch(str(line.get("episode", "")), self.sessions, self._search(line))
            )
        elif "passage" in line:
            if line["passage"] != len(self.passages):
                raise ValueError("a passage out of order")
            self.passages.append(Passage(_text(line["id"]), _text(line["contents"])))
        else:
            self.sessions = int(line["session"])

    def _search(self, line: Mapping[str, Any]) -> Search:
        line = current_fields("cassette", line)
        hits = tuple(Hit(self._passage(number), float(score)) for number, score in line.get("hits", ()))
        digest = self.header.digests.get(line.get("retriever", ""), "")
        plain = {name: line[name] for name in _PLAIN if name in line}
        for name, value in plain.items():
            if not isinstance(value, type(_PLAIN[name])):
                raise TypeError(name)
        if plain.get("status", "ok") not in _STATUSES:
            raise ValueError("an unknown status")
        return Search(_text(line["query"]), hits, **{"index_digest": digest, **plain})

    def _passage(self, number: int) -> Passage:
        if number < 0:
            raise IndexError(number)
        return self.passages[number]


def read_cassette(path: Path) -> Cassette | None:
    """The cassette at `path`; None where nothing complete is on it yet. Its last line may be torn.

    Raises UserError for a file that is no cassette, that is newer, or that is damaged.
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
    try:
        with open(path, "rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))
    except OSError as error:
        raise UserError(f"the cassette {path} cannot be read: {error.strerror}") from error


def _header(path: Path, line: Any) -> CassetteHeader:
    if not isinstance(line, dict) or line.get("kind") != KIND:
        raise UserError(f"{path} is no cassette of searches; record one: --set 'search.cassette=record FILE'")
    check_format(path, line.get("format"))
    line = current_fields("cassette", line)
    try:
        retrievers = line["retrievers"]
        return CassetteHeader(
            line["topk"], dict(line["digests"]), None if retrievers is None else tuple(retrievers)
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}:1: the cassette is damaged, its header is not whole; record it again"
        ) from error


def _add(cassette: Cassette, line: Any, where: str) -> None:
    try:
        cassette.add(line)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(
            f"{where}: the cassette is damaged, this line is no search and no passage; record it again"
        ) from error


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a text was expected")
    return value


class CassetteWriter:
    """Adds searches to a cassette, each on the disk's way before `write` returns, so that a kill loses none.

    A new file, or with `append` one that is there, of which a torn last line is cut off. One process at
    a time. Raises UserError where that cannot be, and where the cassette is of other searches.
    """

    def __init__(self, path: Path, header: CassetteHeader, append: bool = False) -> None:
        self._path, self._digests = path, dict(header.digests)
        self._numbers: dict[str, int] = {}
        self._file: BinaryIO | None = None
        self._refuse(path.exists() and not append)
        try:
            with self._writing():
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open()
                cassette = read_cassette(path)
                self._refuse(cassette is not None and not append)
                self._begin(header, cassette)
        except UserError:
            self.close()
            raise

    def _refuse(self, exists: bool) -> None:
        if exists:
            raise UserError(
                f"the cassette {self._path} exists already; choose another name, or remove it first"
            )

    def write(self, search: Search, episode: str) -> None:
        """One search. Raises UserError on a full disk."""
        hits = [[self._number(hit.passage), float(hit.score)] for hit in search.hits]
        line: dict[str, Any] = {"query": search.query}
        usual = {**_PLAIN, "index_digest": self._digests.get(search.retriever, "")}
        line |= {name: value for name in usual if (value := getattr(search, name)) != usual[name]}
        if hits:
            line["hits"] = hits
        self._put({"episode": episode, **line} if episode else line)

    def close(self) -> None:
        """Make sure that all is on the disk. Another `write` opens the cassette again."""
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
            raise UserError(f"the cassette {self._path} goes on only with the same searches: {why}")
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
        self._file = open(self._path, "ab")  # noqa: SIM115 - until it is closed
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            log.debug("the file system of the cassette %s has no locks: %s", self._path, error)
        return self._file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError as error:
            raise UserError(
                f"another run records on the cassette {self._path}; choose another name"
            ) from error
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
    """What makes the searches of two headers different ones; empty when nothing does."""
    if before.topk != now.topk:
        return f"it has topk={before.topk}, not {now.topk}"
    for retriever, digest in now.digests.items():
        known = before.digests.get(retriever, "")
        if digest and known and digest != known:
            named = f" of the retriever {retriever!r}" if retriever else ""
            return f"it has the index{named} {known[:12]}, not {digest[:12]}"
    return ""
