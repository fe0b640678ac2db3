"""Builds a Lucene index whose n-th document is the n-th passage."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from srl.errors import UserError
from srl.index.passages import PassageStore
from srl_lucene import java, lucene
from srl_lucene.options import Options

_SMALLEST_PART = 1000
_BUFFER_MB = 16, 256


@dataclass(frozen=True, slots=True)
class _Work:
    """The shared state of a build's threads; `done` has the number of passages of each."""

    store: PassageStore
    terms_of: Any
    buffer_mb: float
    done: array[int]
    stop: Event


def write_index(store: PassageStore, folder: Path, options: Options, progress: Callable[[int], None]) -> None:
    """Index the passages of `store` into `folder`. The texts are kept in the store only.

    Each thread indexes a range of the passages. The parts are joined in order and merged into one segment,
    which is searched fastest. Raises UserError if Java's heap is too small.
    """
    java.start(options.heap)
    from jnius import JavaException

    shutil.rmtree(folder, ignore_errors=True)  # left by a killed build
    parts = max(1, min(options.n_threads, len(store) // _SMALLEST_PART))
    buffer = min(max(lucene.heap_mb() / 4 / parts, _BUFFER_MB[0]), _BUFFER_MB[1])
    work = _Work(store, lucene.analyzer(options), buffer, array("q", [0] * parts), Event())
    folders = [folder / f"part-{part}" for part in range(parts)] if parts > 1 else [folder]
    try:
        _write_parts(work, folders, progress)
        _join(work, folder, [part for part in folders if part != folder])
    except JavaException as error:
        if "OutOfMemoryError" not in str(error):
            raise
        raise UserError("Java ran out of memory; give it more, such as --set heap=4g") from error


def _join(work: _Work, folder: Path, parts: list[Path]) -> None:
    """Merge `folder` and `parts` into one segment in `folder`, and remove the parts."""
    whole = lucene.writer(folder, work.terms_of, work.buffer_mb)
    try:
        lucene.join(whole, parts)
        whole.forceMerge(1)
    finally:
        whole.close()
    for part in parts:
        shutil.rmtree(part)
    (folder / "write.lock").unlink()


def _write_parts(work: _Work, folders: list[Path], progress: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(len(folders), "lucene") as pool:
        try:
            pending = {pool.submit(_write, work, part, folders) for part in range(len(folders))}
            while pending:
                finished, pending = wait(pending, timeout=0.2)
                progress(sum(work.done))
                for future in finished:
                    future.result()
        finally:
            work.stop.set()  # after Ctrl-C or the failure of one part, end the others


def _write(work: _Work, part: int, folders: list[Path]) -> None:
    """Index the passages of one part, until `stop` is set."""
    first, end = (len(work.store) * bound // len(folders) for bound in (part, part + 1))
    try:
        with java.lock:
            writer = lucene.writer(folders[part], work.terms_of, work.buffer_mb)
            document, field = lucene.document()
        try:
            for row in range(first, end):
                if work.stop.is_set():
                    break
                field.setStringValue(java.text(work.store[row].contents))
                writer.addDocument(document)
                work.done[part] += 1
        finally:
            writer.close()
    finally:
        java.detach()
