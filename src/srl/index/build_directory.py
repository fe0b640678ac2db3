"""Where an index is built: aside and gone on any error, or, for long builds, where the next try goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import (
    FORMAT,
    MANIFEST,
    atomic_directory,
    read_json,
    read_manifest,
    resumable_directory,
    write_json,
)
from srl.index.manifest import KIND, RECORD
from srl.manifests import replaceable

NOTE = "building.json"
_REPLACEABLE = replaceable(KIND, "an index", besides=(RECORD,))


class BuildDirectory:
    """The directory of a build, and what an earlier try noted there of what it was building."""

    def __init__(self, directory: Path, plan: Mapping[str, Any], noted: Mapping[str, Any]) -> None:
        self.directory = directory
        self._plan = dict(plan)
        self._noted = noted

    def found_corpus(self, digest: str) -> None:
        """Check that the corpus is the one of the earlier try. Raises UserError where it is another."""
        before = self._noted.get("corpus_digest")
        if before not in (None, digest):
            raise UserError(f"{self.directory} holds an unfinished index of another corpus; {_WAYS}")
        if self._noted:
            _write_note(self.directory, {**self._plan, "corpus_digest": digest})


_WAYS = "finish that one, remove it, or add --force to start anew"


@contextmanager
def build_directory(
    out: Path, plan: Mapping[str, Any], resumable: bool, overwrite: bool
) -> Iterator[BuildDirectory]:
    """A directory that becomes `out` at the end. `plan` (retriever, options, …) is what will be built.

    Raises UserError where `out` is taken, or holds the beginning of something else.
    """
    _refuse_index(out, overwrite)
    replace = _REPLACEABLE if overwrite else None
    if not resumable:
        with atomic_directory(out, replace=replace) as directory:
            yield BuildDirectory(directory, plan, {})
        return
    with resumable_directory(out, replace=replace) as directory:
        yield BuildDirectory(directory, plan, _resume(directory, dict(plan), overwrite))
        (directory / NOTE).unlink()


def _resume(directory: Path, plan: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """What is noted in `directory`, which is emptied first where that is something else and may be."""
    noted = _note(directory)
    same = noted is not None and {name: noted.get(name) for name in plan} == plan
    if noted is not None and not same and not overwrite:
        raise UserError(
            f"{directory} holds an unfinished index by {noted.get('retriever')} with other options; {_WAYS}"
        )
    if noted is None or not same:
        _empty(directory)
        noted = plan
        _write_note(directory, noted)
    return noted


def _write_note(directory: Path, noted: Mapping[str, Any]) -> None:
    write_json(directory / NOTE, {"format": FORMAT, **noted})


def _note(directory: Path) -> dict[str, Any] | None:
    """The note of an earlier try; None where there is none and the directory is ours to empty."""
    if (directory / NOTE).is_file():
        return read_json(directory / NOTE, dict[str, Any])
    if any(directory.iterdir()):  # else than the index that was replaced when the process died
        if not (directory / MANIFEST).is_file():
            raise UserError(f"{directory} is there and is not the beginning of an index; remove or rename it")
        _REPLACEABLE(directory)
    return None


def _empty(directory: Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _refuse_index(out: Path, overwrite: bool) -> None:
    """Raise UserError, naming the way, where an index is at `out` that is not to be replaced."""
    if not overwrite and (out / MANIFEST).is_file():
        passages = read_manifest(out, KIND).get("passages")
        raise UserError(
            f"{out} exists already, an index of {passages} passages; "
            "add --force to replace it, or choose another --out"
        )
