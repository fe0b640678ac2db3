"""Analysing a corpus in several processes, each a run of its passages; the result is that of one.

A process is given the directory of the passages and which of them are its own, and writes what
`read_documents` makes of them into files: no passage goes through a pipe.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np

from srl.index.passages import PassageStore
from srl_bm25.analysis import Analyzer
from srl_bm25.options import Options
from srl_bm25.postings import Documents, read_documents

SMALLEST = 25_000
"""Passages for which another process is worth its start."""
MOST = 8
_EVERY = 1000
_ENCODING = ("utf-8", "surrogatepass")


def processes(options: Options, passages: int) -> int:
    """How many to use: as asked for, else one for each core, where there is enough to do."""
    wanted = options.build_processes or min(os.cpu_count() or 1, MOST)
    return max(1, min(wanted, passages // SMALLEST))


def read_in_parts(
    store: PassageStore, options: Options, folder: Path, count: int, progress: Callable[[int], None]
) -> Documents:
    """What `read_documents` gives for `store`, by `count` processes that write into `folder` meanwhile."""
    with TemporaryDirectory(prefix="parts-", dir=folder) as name:
        bounds = [len(store) * part // count for part in range(count + 1)]
        parts = [Path(name, str(part)) for part in range(count)]
        running = [
            _start(store.directory, *run, part, options)
            for run, part in zip(pairwise(bounds), parts, strict=True)
        ]
        _await(running, progress)
        return _joined(parts)


def _start(passages: Path, first: int, end: int, part: Path, options: Options) -> subprocess.Popen[str]:
    part.mkdir()
    command = [sys.executable, "-P", "-m", __name__, str(passages), str(first), str(end), str(part)]
    return subprocess.Popen([*command, options.stopwords, options.stemmer], stdout=subprocess.PIPE, text=True)


def _await(running: Sequence[subprocess.Popen[str]], progress: Callable[[int], None]) -> None:
    """Wait for all, adding up what they say they have done. Raises RuntimeError where one fails."""
    done = [0] * len(running)

    def follow(part: int, said: IO[str]) -> None:
        for line in said:
            done[part] = int(line)
            progress(sum(done))

    with ThreadPoolExecutor(len(running)) as pool:
        try:
            list(pool.map(follow, range(len(running)), [each.stdout for each in running]))
            failed = [each.returncode for each in running if each.wait()]
        finally:  # after a failure or ctrl-C the other processes and the threads that read them end too
            for each in running:
                each.kill()
                each.wait()
    if failed:
        raise RuntimeError(f"a worker process of the build ended with exit code {failed[0]}")


def _joined(parts: Sequence[Path]) -> Documents:
    numbers: dict[str, int] = {}
    terms, starts, known = [], [np.zeros(1, np.int64)], 0
    for part in parts:
        words = (part / "words").read_bytes().decode(*_ENCODING).split("\n")[:-1]
        new = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32)
        found = np.load(part / "terms.npy", mmap_mode="r")
        terms.append(new[found] if len(found) else np.empty(0, np.int32))
        starts.append(np.load(part / "starts.npy")[1:] + known)
        known += len(found)
    return Documents(numbers, np.concatenate(terms), np.concatenate(starts))


def work(passages: str, first: str, end: str, part: str, stopwords: str, stemmer: str) -> None:
    """One process: analyse the passages from row `first` to `end`, and print the progress now and then."""
    options = Options.model_validate({"stopwords": stopwords, "stemmer": stemmer})
    store = PassageStore(passages)

    def say(done: int) -> None:
        if done % _EVERY == 0 or done == int(end) - int(first):
            print(done, flush=True)

    rows = (store[row] for row in range(int(first), int(end)))
    found = read_documents(rows, Analyzer(options.stopwords, options.stemmer), say)
    np.save(Path(part, "terms.npy"), found.terms)
    np.save(Path(part, "starts.npy"), found.starts)
    words = "".join(f"{word}\n" for word in found.numbers)
    Path(part, "words").write_bytes(words.encode(*_ENCODING))


if __name__ == "__main__":
    work(*sys.argv[1:])
