"""Downloading Search-R1's published indexes and corpus from the Hugging Face hub (an optional install)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from srl.data.hub import hub_library
from srl.errors import UserError, nearest
from srl.files import locked, read_json, write_json
from srl.hub_models import hub_reason
from srl.index.download import Part, Target, check, fetch, partial
from srl.manifests import MANIFEST, read_manifest, write_manifest

KIND = "pull"
_STATE = ".pull.json"
_NOT_DOWNLOADED = (".gitattributes", "README.md")


@dataclass(frozen=True, slots=True)
class HubDataset:
    """A data set that Search-R1 publishes. `files` are those to download; empty: all of them.

    Where these are the parts of one file, `joined` is its name. `memory` says what searching takes, `then`
    which command comes next; `{out}` in them is the directory, `{size}` the size in GB.
    """

    name: str
    repository: str
    memory: str
    then: str
    files: tuple[str, ...] = ()
    joined: str = ""


HUB_DATASETS = {
    each.name: each
    for each in (
        HubDataset(
            "wiki18-bm25",
            "PeterJinGo/wiki-18-bm25-index",
            "searching it takes about 2 GB of memory for Java, the index itself stays on disk; it has no "
            "passages, so importing it needs the corpus too (srl index pull wiki18-corpus)",
            "srl index import {out}/bm25 --retriever lucene --corpus CORPUS --out DIR",
        ),
        HubDataset(
            "wiki18-e5",
            "PeterJinGo/wiki-18-e5-index",
            "searching it takes {size} GB of memory, or half of that on a GPU in 16-bit floats; it has no "
            "passages, so importing it needs the corpus too (srl index pull wiki18-corpus)",
            "srl index import {out}/e5_Flat.index --retriever e5 --corpus CORPUS --out DIR",
            ("part_aa", "part_ab"),
            "e5_Flat.index",
        ),
        HubDataset(
            "wiki18-corpus",
            "PeterJinGo/wiki-18-corpus",
            "reading it takes little memory; an index stores the passages unpacked, at three times this size",
            "srl index build --corpus {out}/wiki-18.jsonl.gz --out DIR",
            ("wiki-18.jsonl.gz",),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Pull:
    """What is to be downloaded, from which revision (`commit`), and where to."""

    dataset: HubDataset
    out: Path
    commit: str
    targets: tuple[Target, ...]

    @property
    def size(self) -> int:
        return sum(target.size for target in self.targets)

    @property
    def missing(self) -> int:
        """Bytes that have not arrived yet."""
        return self.size - sum(_arrived(self.out / target.name, target) for target in self.targets)

    @property
    def memory(self) -> str:
        return self.dataset.memory.format(out=self.out, size=f"{self.size / 1e9:.0f}")

    @property
    def then(self) -> str:
        return self.dataset.then.format(out=self.out)


def plan_pull(name: str, out: Path, revision: str | None = None, endpoint: str | None = None) -> Pull:
    """Ask the hub which files `name` has, without writing anything.

    Without `revision`, a pull that was begun at `out` keeps the revision it began with. Raises UserError
    for an unknown name, for a hub that cannot be reached or lacks a file, for an `out` that holds another
    pull, and for a disk that is too small.
    """
    if name not in HUB_DATASETS:
        known = ", ".join(HUB_DATASETS)
        raise UserError(f"no index {name!r} to pull: there are {known}{nearest(name, list(HUB_DATASETS))}")
    dataset = HUB_DATASETS[name]
    begun = _begun(dataset, out)
    commit, parts = _ask(dataset, revision or begun.get("revision"), endpoint)
    held = str(begun.get("revision", commit))
    if commit != held:
        raise UserError(
            f"{out} contains revision {held[:12]} of {name}, not {commit[:12]}; "
            "leave --revision out to resume it, or choose another --out"
        )
    pull = Pull(dataset, out, commit, _targets(dataset, parts))
    _check_room(pull)
    return pull


def run_pull(pull: Pull, report: Callable[[int], None] | None = None) -> Path:
    """Download what is missing, check every digest, and return the directory.

    A kill at any moment keeps what has arrived, and the next call resumes there; called once more it checks
    every file again. `report` is told how many bytes are there. Raises UserError.
    """
    tell, headers = report or _silent, hub_headers()
    with _locked(pull.out):
        begun = {"name": pull.dataset.name, "revision": pull.commit}
        write_json(pull.out / _STATE, {"format": 1, **begun})
        done = 0
        for target in pull.targets:
            _fetch_or_check(pull, target, headers, offset(done, tell))
            done += target.size
            tell(done)
        write_manifest(pull.out, KIND, _facts(pull))
        (pull.out / _STATE).unlink(missing_ok=True)
    return pull.out


def _facts(pull: Pull) -> dict[str, Any]:
    """The manifest of a complete directory."""
    return {
        "name": pull.dataset.name,
        "repository": pull.dataset.repository,
        "revision": pull.commit,
        "files": {target.name: target.size for target in pull.targets},
        "digests": {part.name: part.digest for target in pull.targets for part in target.parts},
    }


def _fetch_or_check(
    pull: Pull, target: Target, headers: dict[str, str], report: Callable[[int], None]
) -> None:
    path = pull.out / target.name
    if path.exists():
        check(path, target, report)
    else:
        fetch(target, path, headers, report)


def _begun(dataset: HubDataset, out: Path) -> dict[str, Any]:
    """What an earlier call noted at `out`, or nothing. Raises UserError where it pulled something else."""
    state: dict[str, Any] = {}
    if (out / MANIFEST).is_file():
        state = read_manifest(out, KIND)
    elif (out / _STATE).is_file():
        state = read_json(out / _STATE, dict)
    if state and state.get("name") != dataset.name:
        raise UserError(f"{out} contains {state.get('name')}, not {dataset.name}; choose another --out")
    return state


def _ask(dataset: HubDataset, revision: str | None, endpoint: str | None) -> tuple[str, list[Part]]:
    """The commit of `revision`, and its files."""
    hub = hub_library(f"pulling {dataset.name}")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError

    where = dataset.repository
    try:
        info = hub.HfApi(endpoint=endpoint).dataset_info(where, revision=revision, files_metadata=True)
    except RevisionNotFoundError as error:
        raise UserError(f"{where} has no revision {revision!r} on the hub; see its commits there") from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(
            f"the hub could not be reached for {where} ({hub_reason(error)}); try again later"
        ) from error
    at = {"repo_type": "dataset", "revision": info.sha, "endpoint": endpoint}
    parts = [
        published_part(each, hub.hf_hub_url(where, each.rfilename, **at))
        for each in info.siblings or ()
        if each.rfilename not in _NOT_DOWNLOADED
    ]
    return info.sha, parts


def published_part(file: Any, url: str) -> Part:
    """A file as the hub lists it. Raises UserError where size or digest is missing."""
    large = file.lfs
    size = file.size if large is None else large.size
    part = Part(file.rfilename, url, size, "" if large is None else large.sha256, file.blob_id or "")
    if size is None or not part.digest:
        raise UserError(f"{url}: the hub gives no size or no digest, so the download could not be checked")
    return part


def _targets(dataset: HubDataset, parts: list[Part]) -> tuple[Target, ...]:
    """The files to write. Raises UserError where the repository lacks one."""
    there = {part.name: part for part in parts}
    wanted = dataset.files or tuple(there)
    if lacking := [name for name in wanted if name not in there] or (not wanted and ["any file"]):
        raise UserError(
            f"{dataset.repository} lacks {', '.join(lacking)} at this revision: it has "
            f"{', '.join(there) or 'nothing'}; choose another with --revision"
        )
    if dataset.joined:
        return (Target(dataset.joined, [there[name] for name in wanted]),)
    for name in wanted:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(
                f"{dataset.repository} has a file {name!r}, which would be written outside of --out"
            )
    return tuple(Target(name, [there[name]]) for name in wanted)


def _check_room(pull: Pull) -> None:
    """Raise UserError unless the disk has space for what is missing."""
    where = next(folder for folder in (pull.out, *pull.out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(where).free
    if pull.missing > free:
        raise UserError(
            f"{pull.dataset.name} needs {in_gb(pull.missing)} more on the disk of {where}, which has "
            f"{in_gb(free)} free; make room, or give a directory on a larger disk with --out"
        )


def _arrived(path: Path, target: Target) -> int:
    """How many bytes of a file have arrived."""
    for place in (path, partial(path)):
        if place.is_file():
            return min(place.stat().st_size, target.size)
    return 0


def in_gb(size: int) -> str:
    """`64.6 GB`; small sizes in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Lock the directory. Raises UserError where another process has locked it."""
    out.mkdir(parents=True, exist_ok=True)
    with locked(out, f"another srl index pull is writing to {out}; wait for it to end"):
        yield


def hub_headers() -> dict[str, str]:
    """The hub's own headers. The token in them is not passed on when the hub redirects to another host."""
    hub_library("a pull")
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="srl")


def offset(before: int, report: Callable[[int], None]) -> Callable[[int], None]:
    """Report bytes on top of those `before`."""
    return lambda arrived: report(before + arrived)


def _silent(arrived: int) -> None:
    """Report nothing."""
