"""Searches recorded on a tape, and answered from it: a run repeats with no server and no index."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.serve.tape import Entry, Header, Tape, TapeWriter, read_tape
from srl.trajectory import Search, SearchTool, current_episode


class MissingFromTape(UserError):  # noqa: N818 - named in the public interface
    """A query that was not asked when the tape was recorded."""


class Recorder:
    """Passes queries on and writes every outcome, faults too, to a tape.

    `append` goes on with a tape that is there, as a resumed run does; without it such a file is refused.
    """

    engines: Sequence[str]
    """The names of the engines; only where the search behind it has some."""

    def __init__(
        self, search: SearchTool, path: Path | str, *, topk: int | None = None, append: bool = False
    ) -> None:
        self._search: Any = search
        engines = getattr(search, "engines", None)
        if engines is not None:
            self.engines = tuple(engines)
        names = None if engines is None else tuple(engines)
        self._tape = TapeWriter(Path(path), Header(topk, self.digests, names), append)

    @property
    def index_digest(self) -> str:
        return str(getattr(self._search, "index_digest", ""))

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each engine's index by its name, "" for the default one."""
        return dict(getattr(self._search, "digests", None) or {"": self.index_digest})

    async def search(self, query: str, engine: str = "") -> Search:
        """The outcome of one query, recorded. Raises UserError where the tape cannot be written."""
        found: Search = await (self._search.search(query, engine) if engine else self._search.search(query))
        self._tape.write(replace(found, query=query, engine=engine), current_episode.get())
        return found

    async def connect(self) -> None:
        """As the search behind it does."""
        if (connect := getattr(self._search, "connect", None)) is not None:
            await connect()

    async def aclose(self) -> None:
        """Close tape and connections; another search opens them again."""
        self._tape.close()
        if (close := getattr(self._search, "aclose", None)) is not None:
            await close()


class Replay:
    """Answers queries from a tape as they were answered when it was recorded.

    An episode gets the outcomes that it got then, in their order. An episode that the tape does not
    know, or that asks something new, gets what others got for the query: the outcomes in the order they
    were recorded, the last one again and again.
    Raises UserError for what is no tape, and where it was recorded with another `topk`.
    """

    engines: Sequence[str]
    """The names of the engines; only where the recorded search had some."""

    def __init__(self, path: Path | str, *, topk: int | None = None) -> None:
        self._path = Path(path)
        tape = _load(self._path)
        if None not in (topk, tape.header.topk) and topk != tape.header.topk:
            raise UserError(
                f"the tape {path} was recorded with topk={tape.header.topk}, not {topk}; set that"
            )
        if tape.header.engines is not None:
            self.engines = tape.header.engines
        self.digests = _digests(tape)
        self._outcomes = _by_key(tape.entries)
        self._played: Counter[tuple[str, str, str]] = Counter()

    @property
    def index_digest(self) -> str:
        return self.digests.get("", "")

    async def search(self, query: str, engine: str = "") -> Search:
        """What came of the query then. Raises MissingFromTape for one that was not asked."""
        await asyncio.sleep(0)
        for episode in (current_episode.get(), ""):
            key = (episode, engine, query)
            if outcomes := self._outcomes.get(key):
                found = outcomes[min(self._played[key], len(outcomes) - 1)]
                self._played[key] += 1
                return found
        asked = f"{_shortened(query)}{f' from the engine {engine!r}' if engine else ''}"
        raise MissingFromTape(
            f"the tape {self._path} has no answer to {asked}: this run asks what the recorded one did not; "
            "record again: --set 'search.cassette=record FILE'"
        )

    async def aclose(self) -> None:
        """Nothing to close; as `HttpSearch.aclose`."""


def _load(path: Path) -> Tape:
    if not path.exists():
        raise UserError(f"there is no tape {path}; record one: --set 'search.cassette=record {path}'")
    if (tape := read_tape(path)) is None:
        raise UserError(f"nothing is on the tape {path}; record it again")
    return tape


def _digests(tape: Tape) -> dict[str, str]:
    """Of each engine, as the header says, or else the first of its outcomes that says one."""
    digests = dict(tape.header.digests)
    for entry in tape.entries:
        engine = entry.search.engine
        if engine in digests:
            digests[engine] = digests[engine] or entry.search.index_digest
    return digests


def _by_key(entries: Sequence[Entry]) -> dict[tuple[str, str, str], list[Search]]:
    """The outcomes by (episode, engine, query), and of all episodes by ("", engine, query).

    An episode that was run again when the recording was resumed has what it got the last time.
    """
    last = {entry.episode: entry.session for entry in entries}
    found: dict[tuple[str, str, str], list[Search]] = {}
    for entry in entries:
        search = entry.search
        found.setdefault(("", search.engine, search.query), []).append(search)
        if entry.episode and entry.session == last[entry.episode]:
            found.setdefault((entry.episode, search.engine, search.query), []).append(search)
    return found


def _shortened(query: str, length: int = 80) -> str:
    """The query in quotation marks, on one line, with its middle left out where it is long."""
    if len(query) > length:
        query = f"{query[: length // 2]} … {query[-length // 2 :]}"
    return repr(query)
