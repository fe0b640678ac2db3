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
            start = 0
            for part in target.parts:
                _fetch_part(part, file, start, headers, report)
                start += part.size
            file.truncate(start)
        os.replace(growing, path)
    except OSError as error:
        if is_disk_full(error):
            raise UserError(f"the disk is full at {growing}", hint="free some space and repeat") from error
        raise


def check(path: Path, target: Target, report: Callable[[int], None]) -> None:
    """Raise UserError unless the file at `path` has the published size and digests."""
    start, right = 0, path.stat().st_size == target.size
    with open(path, "rb") as file:
        for part in target.parts:
            digest = part.hasher()
            _read(file, start, part.size, digest, report)
            right = right and digest.hexdigest() == part.digest
            start += part.size
    if not right:
        raise UserError(
            f"{path} exists and is not the published file", hint="remove it, or choose another --out"
        )


class _RetryableError(Exception):
    """A request failed, and the next one may not."""


def _fetch_part(
    part: Part, file: IO[bytes], start: int, headers: dict[str, str], report: Callable[[int], None]
) -> None:
    """Request what is missing of a part, whose place in `file` is `start`, until it is there and right."""
    digest = part.hasher()
    have = _read(file, start, part.size, digest, report)
    failures = 0
    while have < part.size:
        before = have
        try:
            for chunk in _chunks(part, have, headers):
                file.write(chunk)
                digest.update(chunk)
                have += len(chunk)
                report(start + have)
                if have > part.size:
                    break
            else:
                if have < part.size:
                    raise _RetryableError("the connection ended early")
        except (_RetryableError, httpx.TransportError) as error:
            failures = 1 if have > before else failures + 1
            if failures == _ATTEMPTS:
                raise UserError(
                    f"{part.name} could not be downloaded from {httpx.URL(part.url).host}: {error}",
                    hint="the same command resumes what has arrived",
                ) from error
            log.info("%s: %s; trying again at byte %d", part.name, error, have)
            time.sleep(_PAUSE_S * 2 ** (failures - 1))
    file.flush()
    if have > part.size or digest.hexdigest() != part.digest:
        file.truncate(start)
        raise UserError(
            f"{part.name}: the hub sent other bytes than it lists (digest {part.digest[:12]})",
            hint="they were deleted, and the same command downloads them again",
        )
    os.fsync(file.fileno())


def _chunks(part: Part, have: int, headers: dict[str, str]) -> Any:
    """What one request brings of the part after its first `have` bytes, piece by piece.

    Raises _RetryableError and httpx.TransportError where another request may bring more.
    """
    from huggingface_hub.utils import get_session

    ranged = {**headers, "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    with get_session().stream("GET", part.url, headers=ranged, timeout=_TIMEOUT_S) as response:
        status = response.status_code
        if status in _RETRIED:
            raise _RetryableError(f"status {status}")
        if status in (401, 403):
            raise UserError(
                f"{part.name}: the hub denies access (status {status})",
                hint="set HF_TOKEN to a token that has it",
            )
        if status not in (200, 206):
            raise UserError(f"{part.name} could not be downloaded from {response.url.host}: status {status}")
        unwanted = have if status == 200 else 0  # a server without ranges begins at the first byte
        for chunk in response.iter_bytes():
            yield chunk[unwanted:]
            unwanted = max(unwanted - len(chunk), 0)


def _read(file: IO[bytes], start: int, size: int, digest: Any, report: Callable[[int], None]) -> int:
    """Add up to `size` bytes from `start` to the digest, and return how many there are."""
    file.seek(start)
    have = 0
    while have < size and (chunk := file.read(min(size - have, _CHUNK))):
        digest.update(chunk)
        have += len(chunk)
        report(start + have)
    return have
