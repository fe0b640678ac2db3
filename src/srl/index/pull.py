"""Downloading Search-R1's published indexes and corpus from the Hugging Face hub (an optional install).

huggingface_hub lists the files, holds the token and opens the connections. Its own `hf_hub_download` (1.33)
deletes a file that did not arrive whole and compares sizes, not digests; resuming and checking are done here.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path
from typing import IO, Any

import httpx

from srl.data.hub import hub_library
from srl.errors import UserError, nearest
from srl.files import MANIFEST, locked, read_manifest, write_manifest
from srl.models.hub import hub_reason

log = logging.getLogger(__name__)

KIND = "pull"
Report = Callable[[int], None]
"""Told how many bytes are there."""
_NOT_DOWNLOADED = (".gitattributes", "README.md")
_ATTEMPTS = 6
"""Requests in a row that may bring nothing before a download is given up."""
_PAUSE_S = 1.0
_TIMEOUT_S = 60.0
_CHUNK = 1 << 20
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A data set that Search-R1 publishes. `files` are those to download; empty: all of them.

    Where these are the parts of one file, `joined` is its name. `memory` says what searching takes, `then`
    which command comes next; `{out}` in them is the directory, `{size}` the size in GB.
    """

    repository: str
    memory: str
    then: str
    files: tuple[str, ...] = ()
    joined: str = ""


HUB_DATASETS = {
    "wiki18-bm25": HubDataset(
        "PeterJinGo/wiki-18-bm25-index",
        "searching it takes about 2 GB of memory for Java, the index itself stays on disk; it has no "
        "passages, so importing it needs the corpus too (srl index pull wiki18-corpus)",
        "srl index import {out}/bm25 --retriever lucene --corpus CORPUS --out DIR",
    ),
    "wiki18-e5": HubDataset(
        "PeterJinGo/wiki-18-e5-index",
        "searching it takes {size} GB of memory, or half of that on a GPU in 16-bit floats; it has no "
        "passages, so importing it needs the corpus too (srl index pull wiki18-corpus)",
        "srl index import {out}/e5_Flat.index --retriever e5 --corpus CORPUS --out DIR",
        ("part_aa", "part_ab"),
        "e5_Flat.index",
    ),
    "wiki18-corpus": HubDataset(
        "PeterJinGo/wiki-18-corpus",
        "reading it takes little memory; an index stores the passages unpacked, at three times this size",
        "srl index build --corpus {out}/wiki-18.jsonl.gz --out DIR",
        ("wiki-18.jsonl.gz",),
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One published file; a large one has a `sha256`, a small one only git's own digest."""

    name: str
    url: str
    size: int
    sha256: str
    git_sha1: str

    @property
    def digest(self) -> str:
        return self.sha256 or self.git_sha1

    def hasher(self) -> Any:
        return sha256() if self.sha256 else sha1(b"blob %d\0" % self.size)


@dataclass(frozen=True, slots=True)
class Target:
    """A file to write: its parts one after the other (mostly there is one)."""

    path: Path
    parts: tuple[Part, ...]

    @property
    def partial(self) -> Path:
        """Where the file is kept until it is complete."""
        return self.path.with_name(self.path.name + ".partial")

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def missing(self) -> int:
        """Bytes that have not arrived yet."""
        there = next((file.stat().st_size for file in (self.path, self.partial) if file.is_file()), 0)
        return max(0, self.size - there)


@dataclass(frozen=True, slots=True)
class Pull:
    """What is to be downloaded, from which revision (`commit`), and where to."""

    name: str
    dataset: HubDataset
    out: Path
    commit: str
    targets: tuple[Target, ...]

    @property
    def size(self) -> int:
        return sum(target.size for target in self.targets)

    @property
    def missing(self) -> int:
        return sum(target.missing for target in self.targets)

    def in_words(self, text: str) -> str:
        """`text` of the data set with the directory and the size."""
        return text.format(out=self.out, size=f"{self.size / 1e9:.0f}")


def plan_pull(name: str, out: Path, revision: str | None = None, endpoint: str | None = None) -> Pull:
    """Ask the hub which files `name` has, without writing anything.

    Without `revision`, a pull that was begun at `out` keeps the revision it began with. Raises UserError
    for an unknown name, for a hub that cannot be reached or lacks a file, for an `out` that holds another
    pull, and for a disk that is too small.
    """
    dataset = HUB_DATASETS.get(name)
    if dataset is None:
        names = ", ".join(HUB_DATASETS)
        raise UserError(f"no index {name!r} to pull: there are {names}{nearest(name, list(HUB_DATASETS))}")
    begun = read_manifest(out, KIND) if (out / MANIFEST).is_file() else {"name": name, "revision": revision}
    commit, parts = _published(name, dataset.repository, revision or begun["revision"], endpoint)
    if begun["name"] != name or begun["revision"] not in (None, commit, revision):
        holds = f"{begun['name']} at revision {str(begun['revision'])[:12]}"
        raise UserError(f"{out} contains {holds}, not {name} at {commit[:12]}", hint="choose another --out")
    files = dataset.files or tuple(parts)
    if missing := [each for each in files if each not in parts]:
        raise UserError(f"{dataset.repository} lacks {', '.join(missing)} at this revision")
    if outside := [each for each in files if Path(each).is_absolute() or ".." in Path(each).parts]:
        raise UserError(f"{dataset.repository} has a file {outside[0]!r}, which would be outside of --out")
    targets = [Target(out / each, (parts[each],)) for each in files]
    if dataset.joined:
        targets = [Target(out / dataset.joined, tuple(parts[each] for each in files))]
    pull = Pull(name, dataset, out, commit, tuple(targets))
    free = shutil.disk_usage(next(each for each in (out, *out.absolute().parents) if each.exists())).free
    if pull.missing > free:
        what = f"{name} needs {in_gb(pull.missing)} more on the disk of {out}, which has {in_gb(free)} free"
        raise UserError(what, hint="make room, or give a directory on a larger disk with --out")
    return pull


def _published(
    name: str, repository: str, revision: str | None, endpoint: str | None
) -> tuple[str, dict[str, Part]]:
    """The commit of `revision`, and its files by name. Raises UserError."""
    hub = hub_library(f"pulling {name}")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError

    try:
        info = hub.HfApi(endpoint=endpoint).dataset_info(repository, revision=revision, files_metadata=True)
    except RevisionNotFoundError as error:
        raise UserError(f"{repository} has no revision {revision!r} on the hub") from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(f"the hub could not be reached for {repository}: {hub_reason(error)}") from error
    at = {"repo_type": "dataset", "revision": info.sha, "endpoint": endpoint}
    parts = {}
    for file in info.siblings or ():
        if file.rfilename not in _NOT_DOWNLOADED:
            url, large = hub.hf_hub_url(repository, file.rfilename, **at), file.lfs
            size, digest = (large.size, large.sha256) if large else (file.size, "")
            parts[file.rfilename] = Part(file.rfilename, url, size, digest, file.blob_id or "")
            if size is None or not parts[file.rfilename].digest:
                raise UserError(f"{url}: the hub gives no size or no digest to check the download by")
    return info.sha, parts


def run_pull(pull: Pull, report: Report = lambda arrived: None) -> Path:
    """Download what is missing, check every digest, and return the directory.

    A kill at any moment keeps what has arrived, and the next call resumes there; called once more it checks
    every file again. `report` is told how many bytes are there. Raises UserError.
    """
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(library_name="srl")  # the token is not passed on to another host
    pull.out.mkdir(parents=True, exist_ok=True)
    with locked(pull.out, f"another srl index pull is writing to {pull.out}; wait for it to end"):
        manifest = {
            "name": pull.name,
            "repository": pull.dataset.repository,
            "revision": pull.commit,
            "files": {str(target.path.relative_to(pull.out)): target.size for target in pull.targets},
            "digests": {part.name: part.digest for target in pull.targets for part in target.parts},
        }
        write_manifest(pull.out, KIND, manifest)
        done = 0
        for target in pull.targets:
            _fetch(target, headers, done, report)
            done += target.size
            report(done)
    return pull.out


def _fetch(target: Target, headers: dict[str, str], before: int, report: Report) -> None:
    """Download the target, resuming where an earlier call stopped; one that is there is only checked.

    Parts are appended to one file as they arrive, so the disk never holds more than the target. What an
    earlier call left is read again, to check its digest too. `report` is told the bytes, and those `before`.
    """

    def told(arrived: int) -> None:
        report(before + arrived)

    if target.path.exists():
        right, start = target.path.stat().st_size == target.size, 0
        with open(target.path, "rb") as whole:
            for part in target.parts:
                digest = part.hasher()
                _read(whole, start, part.size, digest, told)
                right = right and digest.hexdigest() == part.digest
                start += part.size
        if not right:
            hint = "remove it, or choose another --out"
            raise UserError(f"{target.path} exists and is not the published file", hint=hint)
        return
    target.partial.parent.mkdir(parents=True, exist_ok=True)
    target.partial.touch()
    with open(target.partial, "r+b") as file:
        start = 0
        for part in target.parts:
            _fetch_part(part, file, start, headers, told)
            start += part.size
        file.truncate(start)
    os.replace(target.partial, target.path)


def _fetch_part(part: Part, file: IO[bytes], start: int, headers: dict[str, str], report: Report) -> None:
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
                    raise httpx.RemoteProtocolError("the connection ended early")
        except httpx.TransportError as error:
            failures = 1 if have > before else failures + 1
            if failures == _ATTEMPTS:
                host = httpx.URL(part.url).host
                raise UserError(
                    f"{part.name} could not be downloaded from {host}: {error}",
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


def _chunks(part: Part, have: int, headers: dict[str, str]) -> Iterator[bytes]:
    """What one request brings of the part after its first `have` bytes, piece by piece.

    Raises httpx.TransportError where another request may bring more.
    """
    from huggingface_hub.utils import get_session

    ranged = {**headers, "Range": f"bytes={have}-", "Accept-Encoding": "identity"}
    with get_session().stream("GET", part.url, headers=ranged, timeout=_TIMEOUT_S) as response:
        status = response.status_code
        if status in _RETRIED:
            raise httpx.TransportError(f"status {status}")
        if status not in (200, 206):
            hint = "set HF_TOKEN to a token that has access" if status in (401, 403) else ""
            raise UserError(f"{part.name} could not be downloaded: status {status}", hint=hint)
        unwanted = have if status == 200 else 0  # a server without ranges begins at the first byte
        for chunk in response.iter_bytes():
            yield chunk[unwanted:]
            unwanted = max(unwanted - len(chunk), 0)


def _read(file: IO[bytes], start: int, size: int, digest: Any, report: Report) -> int:
    """Add up to `size` bytes from `start` to the digest, and return how many there are."""
    file.seek(start)
    have = 0
    while have < size and (chunk := file.read(min(size - have, _CHUNK))):
        digest.update(chunk)
        have += len(chunk)
        report(start + have)
    return have


def in_gb(size: int) -> str:
    """`64.6 GB`; small sizes in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
