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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from srl import __version__
from srl.errors import UserError, parsing
from srl.files import FORMAT, check_format, digest_text
from srl.index import Index
from srl.safe import one_line
from srl.serve.named_retrievers import aclose, connect, digest_of, indexes_of
from srl.trajectory import Hit, Passage, Search, SearchTool, current_episode

KIND = "search cassette"
KEY = "search.cassette"
_DEFAULTS = {
    each.name: each.default
    for each in fields(Search)
    if each.name not in ("hits", "turn") and each.default is not MISSING
}
"""Fields of a search that a line has only if they differ from these; `turn` is set by the episode."""


class MissingFromCassette(UserError):  # noqa: N818 - named in the public interface
    """A query that was not asked when the cassette was recorded."""


@dataclass(frozen=True, slots=True)
class RecordedSearch:
    """One search; `session` is 1 for the run that began the recording, one more after each resume."""

    episode: str
    session: int
    search: Search


@dataclass(slots=True)
class Cassette:
    """The contents of a cassette.

    `digests` has the index digest of each retriever, "" for the default one. `retrievers` are the names of
    the others; None if the recorded search tool took no names. `length`: of its complete lines in bytes.
    """

    topk: int | None
    digests: dict[str, str]
    retrievers: tuple[str, ...] | None
    searches: list[RecordedSearch] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    sessions: int = 1
    length: int = 0


def read_cassette(path: Path) -> Cassette | None:
    """The cassette at `path`; None if it has no complete line yet. An incomplete last line is left out.

    Raises UserError if the file is not a cassette, has another format, or is damaged.
    """
    cassette: Cassette | None = None
    with open(path, "rb") as file:
        for number, data in enumerate(file, start=1):
            if not data.endswith(b"\n"):
                break
            with parsing(f"{path}:{number}: not a line of a cassette"):
                line = json.loads(data.decode("utf-8", "surrogatepass"))
                if cassette is None:
                    cassette = _read_header(path, line)
                else:
                    _read_line(cassette, line)
                cassette.length += len(data)
    return cassette


def _read_header(path: Path, line: Any) -> Cassette:
    if not isinstance(line, dict) or line.get("kind") != KIND:
        raise UserError(f"{path} is not a search cassette", key=KEY)
    check_format(path, line.get("format"))
    names = line["retrievers"]
    return Cassette(line["topk"], dict(line["digests"]), None if names is None else tuple(names))


def _read_line(cassette: Cassette, line: dict[str, Any]) -> None:
    if "passage" in line:
        cassette.passages.append(Passage(line["id"], line["contents"], line.get("url", "")))
    elif "session" in line:
        cassette.sessions = int(line["session"])
    else:
        episode, query = line.pop("episode", ""), line.pop("query")
        hits = tuple(Hit(cassette.passages[place], float(score)) for place, score in line.pop("hits", ()))
        line.setdefault("index_digest", cassette.digests.get(line.get("retriever", ""), ""))
        cassette.searches.append(RecordedSearch(episode, cassette.sessions, Search(query, hits, **line)))


class Recorder:
    """A search tool that passes queries on to another one and records every outcome, faults too.

    Each search is in the file before `search` returns, so a kill loses none. With `append`, recording
    continues in a cassette that may exist, as for a resumed run; an incomplete last line is cut off. Raises
    UserError if the file cannot be written, exists (without `append`), or has other searches.
    """

    retrievers: Sequence[str]
    """The names of the retrievers; only set if the search tool has some."""

    def __init__(
        self, search: SearchTool, path: Path | str, *, topk: int | None = None, append: bool = False
    ) -> None:
        self._search: Any = search
        self._path = Path(path)
        self._numbers: dict[str, int] = {}
        """The number of each passage in the file, by its digest."""
        names = getattr(search, "retrievers", None)
        if names is not None:
            names = self.retrievers = tuple(names)
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not append or not self._path.exists():
                self._path.open("x").close()
        cassette = read_cassette(self._path)
        with self._writing():
            os.truncate(self._path, cassette.length if cassette else 0)
        if cassette is None:
            self._recorded_digests = self.digests
            header = {"format": FORMAT, "kind": KIND, "srl": __version__}
            self._append({**header, "topk": topk, "digests": self.digests, "retrievers": names})
        else:
            self._check_same(cassette, topk)
            self._recorded_digests = cassette.digests
            self._numbers = {_key(passage): number for number, passage in enumerate(cassette.passages)}
            self._append({"session": cassette.sessions + 1})

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
        outcome: Search = await self._search.search(query, *named)
        self._write(replace(outcome, query=query, retriever=retriever), current_episode.get())
        return outcome

    async def connect(self) -> None:
        """Connect the recorded search tool."""
        await connect(self._search)

    async def aclose(self) -> None:
        """Close the connections; the next search opens them again."""
        await aclose(self._search)

    def _check_same(self, cassette: Cassette, topk: int | None) -> None:
        """Raises UserError if what was recorded before is of another k or another index."""
        if cassette.topk != topk:
            raise UserError(
                f"{self._path} was recorded with topk={cassette.topk}, not {topk}", key="search.topk"
            )
        for retriever, digest in self.digests.items():
            recorded = cassette.digests.get(retriever, "")
            if digest and recorded and digest != recorded:
                of = f" of {retriever}" if retriever else ""
                what = f"{self._path} was recorded with the index {recorded[:12]}{of}, not {digest[:12]}"
                raise UserError(what, key=KEY)

    def _write(self, search: Search, episode: str) -> None:
        """Append one search, after those of its passages that are new."""
        lines: list[dict[str, Any]] = []
        hits: list[tuple[int, float]] = []
        for hit in search.hits:
            passage, number = hit.passage, self._numbers.get(_key(hit.passage))
            if number is None:
                number = self._numbers[_key(passage)] = len(self._numbers)
                new = {"passage": number, "id": passage.id, "contents": passage.contents}
                lines.append(new | ({"url": passage.url} if passage.url else {}))
            hits.append((number, float(hit.score)))
        usual = {**_DEFAULTS, "index_digest": self._recorded_digests.get(search.retriever, "")}
        line: dict[str, Any] = {"episode": episode} if episode else {}
        line["query"] = search.query
        line |= {name: value for name in usual if (value := getattr(search, name)) != usual[name]}
        if hits:
            line["hits"] = hits
        self._append(*lines, line)

    def _append(self, *lines: Mapping[str, Any]) -> None:
        texts = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        with self._writing(), open(self._path, "ab") as file:
            file.write("".join(texts).encode("utf-8", "surrogatepass"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"the cassette {self._path} cannot be written: {error.strerror}", key=KEY
            ) from error


def _key(passage: Passage) -> str:
    return digest_text(passage.id, passage.contents, passage.url)


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
        with parsing(f"{KEY}: {path}"):
            cassette = read_cassette(self._path)
        if cassette is None:
            raise UserError(f"the cassette {path} is empty", key=KEY)
        if None not in (topk, cassette.topk) and topk != cassette.topk:
            raise UserError(f"{path} was recorded with topk={cassette.topk}, not {topk}", key="search.topk")
        if cassette.retrievers is not None:
            self.retrievers = cassette.retrievers
        self.digests = cassette.digests
        self._outcomes: dict[tuple[str, str, str], list[Search]] = defaultdict(list)
        """By episode, retriever and query; those of all episodes by ("", retriever, query)."""
        last = {recorded.episode: recorded.session for recorded in cassette.searches}
        for recorded in cassette.searches:
            search = recorded.search
            if self.digests.get(search.retriever) == "":  # not known when the recording began
                self.digests[search.retriever] = search.index_digest
            self._outcomes["", search.retriever, search.query].append(search)
            # Of an episode that ran again after a resume, only the outcomes of its last run count.
            if recorded.episode and recorded.session == last[recorded.episode]:
                self._outcomes[recorded.episode, search.retriever, search.query].append(search)
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
                outcome = outcomes[min(self._played[key], len(outcomes) - 1)]
                self._played[key] += 1
                return outcome
        raise MissingFromCassette(
            f"the cassette {self._path} has no answer to {one_line(query, 80)!r}",
            key=KEY,
            hint="record it again with this policy and these settings",
        )

    async def aclose(self) -> None:
        """Does nothing."""
