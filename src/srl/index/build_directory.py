"""The directory in which an index is built: temporary, or resumable for long builds."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import FORMAT, atomic_directory, read_json, resumable_directory, write_json
from srl.index.manifest import KIND, RECORD
from srl.index.passages import FOLDER
from srl.manifests import MANIFEST, DamagedError, check_files, read_manifest, replaceable

NOTE = "building.json"
BESIDES = (MANIFEST, RECORD, NOTE)
"""Files of a build's directory that are not the index's own."""
_REPLACEABLE = replaceable(KIND, "an index", besides=BESIDES)


class BuildDirectory:
    """The directory of a build, and the note that an interrupted build left in it."""

    def __init__(
        self, directory: Path, plan: Mapping[str, Any], noted: Mapping[str, Any], overwrite: bool = False
    ) -> None:
        self.directory = directory
        self._plan = dict(plan)
        self._noted = noted
        self._overwrite = overwrite

    @property
    def finished(self) -> bool:
        """Whether an interrupted build of this plan had written everything, and was only to be renamed.

        All files are read: after a power loss they may be shorter than the manifest says.
        """
        if not (self.directory / MANIFEST).is_file():
            return False
        expected = read_manifest(self.directory, KIND).get("checksums") or {}
        with suppress(DamagedError):
            check_files(self.directory, expected)
            return bool(expected)
        return False

    def check_corpus(self, digest: str) -> None:
        """Note the digest of the corpus, whose passages are in the directory already.

        Where an interrupted build had another corpus, what it made is removed with `overwrite`, else
        UserError is raised.
        """
        before = self._noted.get("corpus_digest")
        if before not in (None, digest) and self._overwrite:
            _empty(self.directory, keep=FOLDER)
        elif before not in (None, digest):
            raise UserError(
                f"{self.directory} has an unfinished index of another corpus: expected digest "
                f"{str(before)[:12]}, found {digest[:12]}; {_WAYS}"
            )
        if self._noted:
            _write_note(self.directory, {**self._plan, "corpus_digest": digest})


_WAYS = "finish that one, remove it, or add --overwrite to start over"


@contextmanager
def build_directory(
    out: Path, plan: Mapping[str, Any], resumable: bool, overwrite: bool
) -> Iterator[BuildDirectory]:
    """A directory that becomes `out` at the end. `plan` says what is built: retriever, options, identity.

    Raises UserError where `out` exists, or where an interrupted build of something else is there.
    """
    _refuse_index(out, overwrite)
    replace = _REPLACEABLE if overwrite else None
    if not resumable:
        with atomic_directory(out, replace=replace) as directory:
            yield BuildDirectory(directory, plan, {})
        return
    with resumable_directory(out, replace=replace) as directory:
        yield BuildDirectory(directory, plan, _resume(directory, dict(plan), overwrite), overwrite)
    (out / NOTE).unlink(missing_ok=True)


def _resume(directory: Path, plan: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """The note in `directory`. Of another build it is refused, or removed with `overwrite`."""
    noted = _note(directory)
    same = noted is not None and {name: noted.get(name) for name in plan} == plan
    if noted is not None and not same and not overwrite:
        raise UserError(
            f"{directory} has an unfinished index by {noted.get('retriever')} with other options; {_WAYS}"
        )
    if noted is None or not same:
        _empty(directory)
        noted = plan
        _write_note(directory, noted)
    return noted


def _write_note(directory: Path, noted: Mapping[str, Any]) -> None:
    write_json(directory / NOTE, {"format": FORMAT, **noted})


def _note(directory: Path) -> dict[str, Any] | None:
    """The note of an interrupted build, or None. Raises UserError for a directory of something else."""
    if (directory / NOTE).is_file():
        return read_json(directory / NOTE, dict[str, Any])
    if any(directory.iterdir()):  # the old index, if the process died while replacing it
        if not (directory / MANIFEST).is_file():
            raise UserError(f"{directory} exists and is not an unfinished index; remove or rename it")
        _REPLACEABLE(directory)
    return None


def _empty(directory: Path, keep: str = "") -> None:
    for entry in directory.iterdir():
        if entry.name == keep:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _refuse_index(out: Path, overwrite: bool) -> None:
    """Raise UserError where an index is at `out` that may not be replaced."""
    if not overwrite and (out / MANIFEST).is_file():
        passages = read_manifest(out, KIND).get("passages")
        raise UserError(
            f"{out} exists already, an index of {passages} passages; "
            "add --overwrite to replace it, or choose another --out"
        )
