"""Cassettes: searches recorded in a file and replayed from it, so that a run repeats with no server or index.

The file is JSON lines; each line is complete as soon as it is written. The first is the header: format,
`topk`, the digest of each retriever's index. A line with `passage` is a passage, once, numbered in the order
of the file. A line with `query` is a search and its outcome, with `[passage, score]` for each hit; one with
the tool `document` is a whole document, by the id of one of its passages. A line with `session` starts what a
resumed run adds.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from srl import __version__
from srl.errors import UserError, parsing
from srl.files import FORMAT, check_format, digest_text
from srl.safe import one_line
from srl.serve.documents import DOCUMENT
from srl.serve.named_retrievers import aclose, connect, digest_of, lacks_documents
from srl.trajectory import Hit, Passage, Search, SearchTool, current_episode

KIND = "search cassette"
KEY = "search.cassette"
_FIELDS = ("query", "status", "latency_s", "attempts", "error", "index_digest", "retriever", "tool")
"""The fields of a search that are written as they are; the episode sets `turn` and what it showed."""


class MissingFromCassette(UserError):  # noqa: N818 - named in the public interface
    """A query that was not asked when the cassette was recorded."""


@dataclass(slots=True)
class Cassette:
    """The contents of a cassette.

    `digests` has the index digest of each retriever, "" for the default one. `retrievers` are the names of
    the others; None if the recorded search tool took no names. `searches` are the session, the episode and
    the outcome, the session being one more after each resume. `length`: of the complete lines in bytes.
    """

    topk: int | None
    digests: dict[str, str]
    retrievers: tuple[str, ...] | None
    searches: list[tuple[int, str, Search]] = field(default_factory=list)
    passages: list[Passage] = field(default_factory=list)
    sessions: int = 1
    length: int = 0

    def add(self, line: dict[str, Any]) -> None:
        """Add what a line after the header has."""
        if "passage" in line:
            self.passages.append(Passage.of(line["passage"]))
        elif "session" in line:
            self.sessions = int(line["session"])
        else:
            hits = tuple(Hit(self.passages[place], float(score)) for place, score in line.pop("hits"))
            self.searches.append((self.sessions, line.pop("episode"), Search(hits=hits, **line)))


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
                if cassette is not None:
                    cassette.add(line)
                elif not isinstance(line, dict) or line.get("kind") != KIND:
                    raise UserError(f"{path} is not a search cassette", key=KEY)
                else:
                    check_format(path, line.get("format"))
                    names = line["retrievers"]
                    names = None if names is None else tuple(names)
                    cassette = Cassette(line["topk"], dict(line["digests"]), names)
                cassette.length += len(data)
    return cassette


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
        passages = cassette.passages if cassette else ()
        self._numbers = {_key(passage): place for place, passage in enumerate(passages)}
        if cassette is None:
            header = {"format": FORMAT, "kind": KIND, "srl": __version__}
            self._append({**header, "topk": topk, "digests": self.digests, "retrievers": names})
        else:
            _check_topk(self._path, cassette, topk)
            for retriever, digest in self.digests.items():
                earlier = cassette.digests.get(retriever, "")
                if digest and earlier and digest != earlier:
                    suffix = f" of {retriever}" if retriever else ""
                    what = f"{path} was recorded with the index {earlier[:12]}{suffix}, not {digest[:12]}"
                    raise UserError(what, key=KEY)
            self._append({"session": cassette.sessions + 1})

    @property
    def index_digest(self) -> str:
        return digest_of(self._search)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each retriever's index by its name, "" for the default one."""
        return dict(getattr(self._search, "digests", None) or {"": self.index_digest})

    async def search(self, query: str, retriever: str = "") -> Search:
        """The outcome of one query, recorded. Raises UserError if the cassette cannot be written."""
        outcome: Search = await self._search.search(query, *([retriever] if retriever else []))
        self._record(replace(outcome, query=query, retriever=retriever))
        return outcome

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The document of a passage, recorded as a search is."""
        outcome: Search = await self._search.document(passage, retriever)
        self._record(outcome)
        return outcome

    async def lacks_documents(self) -> str:
        return await lacks_documents(self._search)

    def _record(self, search: Search) -> None:
        passages = {_key(hit.passage): hit.passage for hit in search.hits}
        new = [key for key in passages if key not in self._numbers]
        self._numbers |= {key: place for place, key in enumerate(new, len(self._numbers))}
        hits = [(self._numbers[_key(hit.passage)], float(hit.score)) for hit in search.hits]
        line = {"episode": current_episode.get(), "hits": hits}
        line |= {name: getattr(search, name) for name in _FIELDS}
        self._append(*({"passage": passages[key].row()} for key in new), line)

    async def connect(self) -> None:
        """Connect the recorded search tool."""
        await connect(self._search)

    async def aclose(self) -> None:
        """Close the connections; the next search opens them again."""
        await aclose(self._search)

    def _append(self, *lines: Mapping[str, Any]) -> None:
        texts = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
        with self._writing(), open(self._path, "ab") as file:
            file.write("".join(texts).encode("utf-8", "surrogatepass"))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"the cassette {self._path} cannot be written: {error.strerror}"
            raise UserError(what, key=KEY) from error


def _key(passage: Passage) -> str:
    return digest_text(json.dumps(passage.row()))


def _check_topk(path: Path, cassette: Cassette, topk: int | None) -> None:
    if None not in (topk, cassette.topk) and topk != cassette.topk:
        raise UserError(f"{path} was recorded with topk={cassette.topk}, not {topk}", key="search.topk")


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
        _check_topk(self._path, cassette, topk)
        if cassette.retrievers is not None:
            self.retrievers = cassette.retrievers
        self.digests = cassette.digests
        self._outcomes: dict[tuple[str, str, str, str], list[Search]] = defaultdict(list)
        """By episode, tool, retriever and query; those of all episodes by ("", tool, retriever, query)."""
        last = {episode: session for session, episode, _ in cassette.searches}
        for session, episode, search in cassette.searches:
            if self.digests.get(search.retriever) == "":  # not known when the recording began
                self.digests[search.retriever] = search.index_digest
            key = (search.tool, search.retriever, search.query)
            self._outcomes["", *key].append(search)
            # Of an episode that ran again after a resume, only the outcomes of its last run count.
            if episode and session == last[episode]:
                self._outcomes[episode, *key].append(search)
        self._played: Counter[tuple[str, str, str, str]] = Counter()

    @property
    def index_digest(self) -> str:
        return self.digests.get("", "")

    async def search(self, query: str, retriever: str = "") -> Search:
        """The recorded outcome. Raises MissingFromCassette for a query that was not recorded."""
        return await self._recorded("search", retriever, query)

    async def document(self, passage: Passage, retriever: str = "") -> Search:
        """The recorded document. Raises MissingFromCassette for one that was not recorded."""
        return await self._recorded(DOCUMENT, retriever, passage.id)

    async def lacks_documents(self) -> str:
        return ""

    async def _recorded(self, tool: str, retriever: str, query: str) -> Search:
        await asyncio.sleep(0)
        for episode in (current_episode.get(), ""):
            key = (episode, tool, retriever, query)
            if outcomes := self._outcomes.get(key):
                outcome = outcomes[min(self._played[key], len(outcomes) - 1)]
                self._played[key] += 1
                return outcome
        raise MissingFromCassette(
            f"the cassette {self._path} has no answer to {one_line(query, 80)!r}",
            key=KEY,
            hint="record it again with this policy and these settings",
        )
