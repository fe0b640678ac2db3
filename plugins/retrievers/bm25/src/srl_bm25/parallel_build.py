"""Analyses a corpus in several processes, with the same result as in one.

Each process gets the directory of the passages and a range of rows, and writes the result of
`read_documents` to files, so that no passage is sent through a pipe. All report their progress through one.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL
from tempfile import TemporaryDirectory

import numpy as np

from srl.errors import UserError
from srl.index import PassageStore
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
    number = options.build_processes or min(os.cpu_count() or 1, MAX_PROCESSES)
    return max(1, min(number, passages // MIN_PASSAGES))


def read_in_parts(
    store: PassageStore, options: Options, folder: Path, count: int, progress: Callable[[int], None]
) -> Documents:
    """The result of `read_documents` for `store`, by `count` processes with temporary files in `folder`.

    Raises UserError if one was killed, OSError if one could not write, and RuntimeError for other failures.
    """
    bounds = [len(store) * part // count for part in range(count + 1)]
    with TemporaryDirectory(prefix="parts-", dir=folder) as name:
        parts = [Path(name, str(part)) for part in range(count)]
        reading, writing = os.pipe()
        running: list[subprocess.Popen[bytes]] = []
        with open(reading) as counts:
            try:
                for (first, end), part in zip(pairwise(bounds), parts, strict=True):
                    running.append(_start(store.directory, first, end, part, options, writing))
                os.close(writing)
                analysed = 0
                for line in counts:  # until the last process ends
                    analysed += int(line)
                    progress(analysed)
                codes = [each.wait() for each in running]
            finally:  # after a failure or ctrl-C the processes end too
                for each in running:
                    each.kill()
                    each.wait()
        _check(codes)
        return _joined(parts)


def _start(
    passages: Path, first: int, end: int, part: Path, options: Options, stdout: int
) -> subprocess.Popen[bytes]:
    part.mkdir()
    rows = [str(passages), str(first), str(end), str(part)]
    command = [sys.executable, "-P", "-m", __name__, *rows, options.stopwords, options.stemmer]
    return subprocess.Popen(command, stdout=stdout)


def _check(codes: Sequence[int]) -> None:
    if -SIGKILL in codes:
        raise UserError(
            f"one of the {len(codes)} processes of the build was killed, most likely since memory ran out",
            key="retriever.bm25.build_processes",
            hint="use fewer, or an index on disk: --retriever lucene",
        )
    for code in filter(None, codes):
        if code in _DISK:
            raise OSError(code, os.strerror(code))
        raise RuntimeError(f"a worker process of the build ended with exit code {code}")


def _joined(parts: Sequence[Path]) -> Documents:
    """The results of all parts as one, with terms numbered in the order of their first occurrence."""
    numbers: dict[str, int] = {}
    terms, starts, tokens = [], [np.zeros(1, np.int64)], 0
    for part in parts:
        words = (part / "words").read_bytes().decode(*_ENCODING).split("\n")[:-1]
        renumbered = np.array([numbers.setdefault(word, len(numbers)) for word in words], np.int32)
        own = np.load(part / "terms.npy", mmap_mode="r")
        terms.append(renumbered[own] if len(own) else np.empty(0, np.int32))
        starts.append(np.load(part / "starts.npy")[1:] + tokens)
        tokens += len(own)
    return Documents(numbers, np.concatenate(terms), np.concatenate(starts))


def work(passages: str, first: str, end: str, part: str, stopwords: str, stemmer: str) -> None:
    """The worker process: analyse rows `first` to `end` (exclusive), and print how many more are done."""
    options = Options.model_validate({"stopwords": stopwords, "stemmer": stemmer})
    store, size = PassageStore(passages), int(end) - int(first)

    def tell(analysed: int) -> None:
        if analysed % _EVERY == 0 or analysed == size:
            # One write, which no other process of the pipe comes between; print may make two.
            os.write(1, b"%d\n" % ((analysed - 1) % _EVERY + 1))

    rows = (store[row] for row in range(int(first), int(end)))
    documents = read_documents(rows, Analyzer(options.stopwords, options.stemmer), tell)
    np.save(Path(part, "terms.npy"), documents.terms)
    np.save(Path(part, "starts.npy"), documents.starts)
    words = "".join(f"{word}\n" for word in documents.numbers)
    Path(part, "words").write_bytes(words.encode(*_ENCODING))


if __name__ == "__main__":
    try:
        work(*sys.argv[1:])
    except OSError as error:
        if error.errno not in _DISK:
            raise
        sys.exit(error.errno)
