"""Verifying the checksums of an index: once after it was copied or changed, not at every opening.

A record notes the verified files by inode, size and time of change, all of which differ for a copy. It lies
in the index, or in the user's cache where the index is read-only.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from srl.errors import CheckFailed, UserError
from srl.files import FORMAT, digest_text, read_json, write_json
from srl.index.manifest import RECORD, Manifest
from srl.manifests import DamagedError, Report, check_files

log = logging.getLogger(__name__)
_LARGE = 1 << 30
"""Bytes from which reading is logged, and then every `_EVERY_S` seconds."""
_EVERY_S = 30.0


def verify(directory: Path, manifest: Manifest, report: Report | None = None) -> None:
    """Verify the checksum of every file, and record it. `report` is called with the bytes of each read.

    Raises UserError where a file is damaged, and CheckFailed where the index has no checksums.
    """
    if manifest.files and not manifest.checksums:
        raise CheckFailed(
            f"{directory} has no checksums, since srl {manifest.srl_version} built it: only the sizes and "
            "ends of its files could be checked; build it again to add them"
        )
    stamp = _stamp(directory, manifest)
    try:
        check_files(directory, manifest.checksums, report or _Log(directory, manifest))
    except DamagedError as error:
        raise UserError(f"{error}; copy or build the index again") from error
    _record(directory, stamp)


def verify_once(directory: Path, manifest: Manifest) -> None:
    """`verify` unless these files were verified before; of several processes one verifies for all.

    An index without checksums, of an older version, passes.
    """
    if is_verified(directory, manifest) or not manifest.checksums:
        return
    with _one_at_a_time(directory):
        if not is_verified(directory, manifest):
            verify(directory, manifest)


def is_verified(directory: Path, manifest: Manifest) -> bool:
    """Whether the files were verified, or written, since they last changed."""
    if not manifest.checksums:
        return not manifest.files
    stamp = _stamp(directory, manifest)
    with suppress(OSError, UserError):
        if read_json(directory / RECORD, dict[str, Any]).get("stamp") == stamp:
            return True
    return _cached(stamp).is_file()


def record(directory: Path, manifest: Manifest) -> None:
    """Record the files of a new index as verified: their checksums were computed from them just now."""
    write_json(directory / RECORD, {"format": FORMAT, "stamp": _stamp(directory, manifest)})


def _record(directory: Path, stamp: str) -> None:
    try:
        write_json(directory / RECORD, {"format": FORMAT, "stamp": stamp})
    except (OSError, UserError):
        try:
            _cached(stamp).parent.mkdir(parents=True, exist_ok=True)
            _cached(stamp).touch()
        except OSError:
            log.warning("%s is verified at every opening: neither it nor the cache is writable", directory)


def _cached(stamp: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "srl", "verified", stamp)


def _stamp(directory: Path, manifest: Manifest) -> str:
    """Differs for every copy and after every change; the same on all machines that share the files."""
    parts = []
    for name, checksum in sorted(manifest.checksums.items()):
        state = (directory / name).stat()
        parts += [name, checksum, f"{state.st_ino} {state.st_size} {state.st_ctime_ns}"]
    return digest_text(*parts)


@contextmanager
def _one_at_a_time(directory: Path) -> Iterator[None]:
    """Lock the directory, on file systems that support it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


class _Log:
    """Logs that a large index is being read, and the progress every half minute."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory, self._done, self._told, self._lock = directory, 0, monotonic(), Lock()
        self._size = manifest.size
        if self._size >= _LARGE:
            log.info("%s is new or changed: verifying its %.1f GB once", directory, self._size / 1e9)

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if monotonic() - self._told >= _EVERY_S:
                self._told = monotonic()
                log.info("%s: %.1f of %.1f GB read", self._directory, self._done / 1e9, self._size / 1e9)
