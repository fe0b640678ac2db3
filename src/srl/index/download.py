"""Resumable downloads from the Hugging Face hub: what has arrived survives a kill at any moment.

huggingface_hub lists the files, holds the token and opens the connections. Its own `hf_hub_download` (1.33)
deletes a file that did not arrive whole and compares sizes, not digests; resuming and checking are done here.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import IO, Any

import httpx

from srl.errors import UserError
from srl.files import is_disk_full

log = logging.getLogger(__name__)

_ATTEMPTS = 6
"""Requests in a row that may bring nothing before a download is given up."""
_PAUSE_S = 1.0
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class Part:
    """One published file: its URL, its size in bytes and its digest.

    A large file has a `sha256`; a small one has only git's own digest (`git_sha1`).
    """

    name: str
    url: str
    size: int
    sha256: str = ""
    git_sha1: str = ""

    def hasher(self) -> Any:
        return sha256() if self.sha256 else sha1(b"blob %d\0" % self.size)

    @property
    def digest(self) -> str:
        return self.sha256 or self.git_sha1


@dataclass(frozen=True, slots=True)
class Target:
    """A file to write: its parts, concatenated (mostly there is one)."""

    name: str
    parts: Sequence[Part]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)


def partial(path: Path) -> Path:
    """Where the file at `path` is kept until it is complete."""
    return path.with_name(path.name + ".partial")


def fetch(target: Target, path: Path, headers: dict[str, str], report: Callable[[int], None]) -> None:
    """Download `target` to `path`, resuming where an earlier call stopped.

    Parts are appended to one file as they arrive, so the disk never holds more than the target. What an
    earlier call left is read again, to check its digest too. `headers` go with each request; `report` is
    told how many bytes are there. Raises UserError when the hub cannot be reached or sends other bytes;
    what has arrived is kept, unless its digest is wrong.
    """
    growing = partial(path)
    growing.parent.mkdir(parents=True, exist_ok=True)
    growing.touch()
    try:
        with open(growing, "r+b") as file:
            if _size(file) > target.size:
                file.truncate(target.size)
            start = 0
            for part in target.parts:
                _fetch_part(_GrowingPart(part, file, start, report), headers)
                start += part.size
        os.replace(growing, path)
    except OSError as error:
        if is_disk_full(error):
            raise UserError(
                f"the disk is full at {growing}; free some space and type the same command again"
            ) from error
        raise


def check(path: Path, target: Target, report: Callable[[int], None]) -> None:
    """Raise UserError unless the file at `path` has the published size and digests."""
    right, start = path.stat().st_size == target.size, 0
    with open(path, "rb") as file:
        for part in target.parts if right else ():
            digest = part.hasher()
            _hash(file, start, part.size, digest, report)
            right = right and digest.hexdigest() == part.digest
            start += part.size
    if not right:
        raise UserError(f"{path} exists and is not the published file; move it away, or choose another --out")


class _GrowingPart:
    """A part at the end of a growing file: how many of its bytes are there, and their digest so far."""

    def __init__(self, part: Part, file: IO[bytes], start: int, report: Callable[[int], None]) -> None:
        self.part, self._start, self._file, self._report = part, start, file, report
        self.have = min(max(_size(file) - start, 0), part.size)
        self._digest = part.hasher()
        _hash(file, start, self.have, self._digest, report)

    def append(self, chunk: bytes) -> None:
        self._file.write(chunk)
        self._digest.update(chunk)
        self.have += len(chunk)
        if self.have > self.part.size:
            self.drop()
            raise UserError(f"{self.part.name}: expected {self.part.size:,} bytes, the hub sent more")
        self._report(self._start + self.have)

    def drop(self) -> None:
        """Delete what is there of the part."""
        self._file.flush()
        self._file.truncate(self._start)
        self._file.seek(self._start)
        self.have, self._digest = 0, self.part.hasher()

    def finish(self) -> None:
        """Flush it to disk. Raises UserError, and deletes the part, where its digest is wrong."""
        self._file.flush()
        os.fsync(self._file.fileno())
        found = self._digest.hexdigest()
        if found != self.part.digest:
            self.drop()
            raise UserError(
                f"{self.part.name}: expected digest {self.part.digest[:12]}…, found {found[:12]}…; "
                "the part was deleted: type the same command again to download it"
            )


class _RetryableError(Exception):
    """A request failed, and the next one may not."""


def _fetch_part(growing: _GrowingPart, headers: dict[str, str]) -> None:
    """Request what is missing until it is there, and check the digest."""
    failures, part = 0, growing.part
    while growing.have < part.size:
        before = growing.have
        try:
            _request(growing, headers)
        except _RetryableError as error:
            failures = 1 if growing.have > before else failures + 1
            if failures == _ATTEMPTS:
                raise UserError(
                    f"{part.name} could not be downloaded from {httpx.URL(part.url).host} ({error}); "
                    "the downloaded part is kept: type the same command again to resume"
                ) from error
            log.info("%s: %s; trying again at byte %d", part.name, error, growing.have)
            time.sleep(_PAUSE_S * 2 ** (failures - 1))
    growing.finish()


def _request(growing: _GrowingPart, headers: dict[str, str]) -> None:
    """One request for the rest of a part. Raises _RetryableError where another may bring more."""
    from huggingface_hub.utils import get_session

    asked = {**headers, "Range": f"bytes={growing.have}-", "Accept-Encoding": "identity"}
    try:
        with get_session().stream("GET", growing.part.url, headers=asked, timeout=_TIMEOUT_S) as response:
            _check_status(growing.part, response)
            if response.status_code != httpx.codes.PARTIAL_CONTENT and growing.have:
                growing.drop()
            for chunk in response.iter_bytes():
                growing.append(chunk)
    except httpx.TransportError as error:
        raise _RetryableError(str(error) or type(error).__name__) from error
    if growing.have < growing.part.size:
        raise _RetryableError("the connection ended early")


def _check_status(part: Part, response: httpx.Response) -> None:
    status = response.status_code
    if status in _RETRIED:
        raise _RetryableError(f"status {status}")
    if status in (401, 403):
        raise UserError(
            f"{part.name}: the hub denies access (status {status}); set HF_TOKEN to a token that has it"
        )
    if status not in (200, 206):
        raise UserError(f"{part.name} could not be downloaded from {response.url.host}: status {status}")


def _size(file: IO[bytes]) -> int:
    return os.fstat(file.fileno()).st_size


def _hash(file: IO[bytes], start: int, size: int, digest: Any, report: Callable[[int], None]) -> None:
    """Add `size` bytes from `start` to the digest."""
    file.seek(start)
    while size > 0 and (chunk := file.read(min(size, _CHUNK))):
        digest.update(chunk)
        size -= len(chunk)
        start += len(chunk)
        report(start)
