"""Analyses a corpus in several processes, with the same result as in one.

Each process gets the directory of the passages and a range of rows, and writes the result of
`read_documents` to files, so that no passage is sent through a pipe.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory
from typing import IO

import numpy as np

from srl.errors import UserError
from srl.index.passages import PassageStore
from srl_bm25.analysis import Analyzer
from srl_bm25.options import Options
from srl_bm25.postings import Documents, read_documents

MIN_PASSAGES = 25_000
"""Minimum number of passages per process; for fewer the start-up costs more than it saves."""
MAX_PROCESSES = 8
_EVERY = 1000
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of writing, which are the exit code of a worker."""
_ENCODING = ("utf-8", "surrogatepass")


def processes(options: Options, passages: int) -> int:
    """How many processes to use: the option's, else one per core, with enough passages for each."""
    wanted = options.build_processes or min(os.cpu_count() or 1, MAX_PROCESSES)
    return max(1, min(wanted, passages // MIN_PASSAGES))


def read_in_parts(
    store: PassageStore, options: Options, folder: Path, count: int, progress: Callable[[int], None]
) -> Documents:
    """The result of `read_documents` for `store`, by `count` processes with temporary files in `folder`."""
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
    """Wait for all processes, and report the sum of their progress.

    Raises UserError if one was killed, OSError if one could not write, and RuntimeError for other failures.
    """
    done = [0] * len(running)

    def follow(part: int, said: IO[str]) -> None:
        for line in said:
            done[part] = int(line)
            progress(sum(done))

    with ThreadPoolExecutor(len(running)) as pool:
        try:
            list(pool.map(follow, range(len(running)), [each.stdout for each in running]))
            failed = [code for each in running if (code := each.wait())]
        finally:  # after a failure or ctrl-C the other processes and the threads that read them end too
            for each in running:
                each.kill()
                each.wait()
    if -SIGKILL in failed:
        raise UserError(
            f"one of the {len(running)} processes of the build was killed, most likely since memory ran out; "
            "use fewer with --set build_processes=1, or an index on disk: --retriever lucene"
        )
    for code in failed:
        if code in _DISK:
            raise OSError(code, os.strerror(code))
        raise RuntimeError(f"a worker process of the build ended with exit code {code}")


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
    """The worker process: analyse rows `first` to `end` (exclusive), and print the progress."""
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
    try:
        work(*sys.argv[1:])
    except OSError as error:
        if error.errno not in _DISK:
            raise
        sys.exit(error.errno)
