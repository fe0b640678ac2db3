"""One pass over a corpus that looks for many passages and many answers at once.

Memory depends on what is looked for, not on the corpus. The passages of an index can be read by several
processes, each a part of the rows: they are memory-mapped files.
"""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain, pairwise
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

    ids: set[str]
    titles: set[str]
    answers: set[str]


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


def scan(passages: Iterable[Passage], sought: Sought, progress: Callable[[int], None]) -> Sought:
    """What of `sought` the passages have; those of large indexes are read by a process for each core."""
    cores = len(os.sched_getaffinity(0))
    if not isinstance(passages, Stores) or len(passages) < _MANY or cores < 2:
        return _scan(passages, sought, progress)
    found, done, parts = Sought(set(), set(), set()), 0, passages.parts()
    with ProcessPoolExecutor(
        min(cores, len(parts)), get_context("spawn"), initializer=_begin, initargs=(sought,)
    ) as pool:
        for (_, rows), part in zip(parts, pool.map(_scan_part, parts), strict=True):
            found = Sought(*map(set.union, found, part))
            done += len(rows)
            progress(done)
    return found


def _scan(passages: Iterable[Passage], sought: Sought, progress: Callable[[int], None]) -> Sought:
    phrases, ids, titles, count = Phrases(sought.answers), set[str](), set[str](), 0
    for count, passage in enumerate(passages, start=1):
        if passage.id in sought.ids:
            ids.add(passage.id)
        if sought.titles and (title := title_key(passage.title)) in sought.titles:
            titles.add(title)
        phrases.see(passage.contents)
        if count % _TOLD == 0:
            progress(count)
    progress(count)
    return Sought(ids, titles, phrases.found)


_sought = Sought(set(), set(), set())
"""What this process looks for, where it is one of several."""


def _begin(sought: Sought) -> None:
    global _sought
    _sought = sought
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that started this one


def _scan_part(part: tuple[Path, range]) -> Sought:
    directory, rows = part
    store = PassageStore(directory)
    return _scan((store[row] for row in rows), _sought, lambda done: None)


class Phrases:
    """Normalised answers that are looked for in many texts, with the meaning of `contains_answer`."""

    def __init__(self, phrases: Iterable[str]) -> None:
        self.found: set[str] = set()
        self._words: set[str] = set()
        self._longer: dict[tuple[str, str], set[str]] = defaultdict(set)  # first two words → phrases
        for phrase in phrases:
            words = phrase.split()
            if len(words) == 1:
                self._words.add(phrase)
            else:
                self._longer[words[0], words[1]].add(phrase)

    def see(self, text: str) -> None:
        """Look for the phrases that no earlier text had."""
        words = normalise_answer(text).split()
        single = self._words.intersection(words)
        self._words -= single
        self.found |= single
        for start, pair in enumerate(pairwise(words)):
            if pair in self._longer:
                for phrase in list(self._longer[pair]):
                    if phrase.split() == words[start : start + 1 + phrase.count(" ")]:
                        self._longer[pair].remove(phrase)
                        self.found.add(phrase)
