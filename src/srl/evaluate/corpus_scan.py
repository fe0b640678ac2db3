"""One pass over a corpus that looks for many passages and many answers at once.

Memory depends on what is looked for, not on the corpus. The passages of an index can be read by several
processes, each a part of the rows: they are memory-mapped files.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from srl.answers import normalise_answer
from srl.data.corpus import title_key
from srl.index.passages import PassageStore
from srl.trajectory import Passage

_MANY = 200_000
"""Passages for which it pays to start processes."""
_PART = 20_000
"""Passages that a process reads at a time, about a second; Ctrl-C waits for two of these."""
_TOLD = 1000


class Sought(NamedTuple):
    """Ids and titles of passages (titles as `title_key` has them), and normalised answers."""

    ids: frozenset[str]
    titles: frozenset[str]
    answers: frozenset[str]


@dataclass(slots=True)
class Found:
    """What of it the corpus has: the ids, the number of passages with each title, the answers.

    `example` is the id of the first passage.
    """

    ids: set[str] = field(default_factory=set)
    titles: Counter[str] = field(default_factory=Counter)
    answers: set[str] = field(default_factory=set)
    example: str = ""

    def add(self, other: Found) -> None:
        """Add what was found in a later part of the corpus."""
        self.ids |= other.ids
        self.titles += other.titles
        self.answers |= other.answers
        self.example = self.example or other.example


class Stores(Iterable[Passage]):
    """The passages of several indexes, one after the other."""

    def __init__(self, stores: Iterable[PassageStore]) -> None:
        self.stores = tuple(stores)

    def __len__(self) -> int:
        return sum(map(len, self.stores))

    def __iter__(self) -> Iterator[Passage]:
        return chain.from_iterable(self.stores)

    def parts(self) -> list[tuple[Path, range]]:
        """Directories and rows, in order, of at most `_PART` passages each."""
        return [
            (store.directory, range(start, min(start + _PART, len(store))))
            for store in self.stores
            for start in range(0, len(store), _PART)
        ]


def scan(passages: Iterable[Passage], sought: Sought, progress: Callable[[int], None]) -> Found:
    """Look for `sought` in all passages, those of large indexes with a process for each core."""
    if isinstance(passages, Stores) and len(passages) >= _MANY and (cores := _cores()) > 1:
        return _scan_parts(passages.parts(), sought, cores, progress)
    return _scan(passages, sought, progress)


def _cores() -> int:
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1


def _scan(passages: Iterable[Passage], sought: Sought, progress: Callable[[int], None]) -> Found:
    found, phrases, count = Found(), Phrases(sought.answers), 0
    for count, passage in enumerate(passages, start=1):
        found.example = found.example or passage.id
        if passage.id in sought.ids:
            found.ids.add(passage.id)
        if sought.titles and (title := title_key(passage.title)) in sought.titles:
            found.titles[title] += 1
        phrases.see(passage.contents)
        if count % _TOLD == 0:
            progress(count)
    progress(count)
    found.answers = phrases.found
    return found


def _scan_parts(
    parts: Sequence[tuple[Path, range]], sought: Sought, workers: int, progress: Callable[[int], None]
) -> Found:
    found, done = Found(), 0
    with ProcessPoolExecutor(
        min(workers, len(parts)), get_context("spawn"), initializer=_begin, initargs=(sought,)
    ) as pool:
        for (_, rows), part in zip(parts, pool.map(_scan_part, parts), strict=True):
            found.add(part)
            done += len(rows)
            progress(done)
    return found


_sought = Sought(frozenset(), frozenset(), frozenset())
"""What this process looks for, where it is one of several."""


def _begin(sought: Sought) -> None:
    global _sought
    _sought = sought
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that started this one


def _scan_part(part: tuple[Path, range]) -> Found:
    directory, rows = part
    store = PassageStore(directory)
    return _scan((store[row] for row in rows), _sought, lambda done: None)


class Phrases:
    """Normalised answers that are looked for in many texts, with the meaning of `contains_answer`."""

    def __init__(self, phrases: Iterable[str]) -> None:
        self.found: set[str] = set()
        self._words: set[str] = set()
        self._longer: dict[str, dict[str, set[str]]] = {}  # first word → second word → phrases
        for phrase in phrases:
            words = phrase.split()
            if len(words) == 1:
                self._words.add(phrase)
            else:
                self._longer.setdefault(words[0], {}).setdefault(words[1], set()).add(phrase)

    def see(self, text: str) -> None:
        """Look for the phrases that no earlier text had."""
        words = normalise_answer(text).split()
        single = self._words.intersection(words)
        self._words -= single
        self.found |= single
        for phrase in list(self._longer_in(words)):
            self._close(phrase)

    def _longer_in(self, words: list[str]) -> Iterator[str]:
        after = iter(words)
        next(after, None)
        for start, (first, second) in enumerate(zip(words, after, strict=False)):
            seconds = self._longer.get(first)
            if seconds is not None and second in seconds:
                for phrase in seconds[second]:
                    if phrase.split() == words[start : start + 1 + phrase.count(" ")]:
                        yield phrase

    def _close(self, phrase: str) -> None:
        if phrase not in self.found:
            self.found.add(phrase)
            first, second = phrase.split()[:2]
            seconds = self._longer[first]
            seconds[second].remove(phrase)
            if not seconds[second]:
                del seconds[second]
