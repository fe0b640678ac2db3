"""Downloading Search-R1's published indexes and corpus from the Hugging Face hub (an optional install)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from srl.data.hub import hub_library
from srl.errors import UserError, nearest
from srl.files import MANIFEST, locked, read_manifest, write_manifest
from srl.index.download import Part, Target, check, fetch, partial
from srl.models.hub import hub_reason

KIND = "pull"
_NOT_DOWNLOADED = (".gitattributes", "README.md")


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
        """Bytes that have not arrived yet."""
        paths = (self.out / target.name for target in self.targets)
        arrived = [
            next((file.stat().st_size for file in (path, partial(path)) if file.is_file()), 0)
            for path in paths
        ]
        return sum(max(0, target.size - have) for target, have in zip(self.targets, arrived, strict=True))

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
    commit, parts = _ask(name, dataset, revision or begun["revision"], endpoint)
    if begun["name"] != name or begun["revision"] not in (None, commit, revision):
        raise UserError(
            f"{out} contains {begun['name']} at revision {str(begun['revision'])[:12]}, not {name} at "
            f"{commit[:12]}",
            hint="choose another --out",
        )
    pull = Pull(name, dataset, out, commit, _targets(dataset, parts))
    place = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if pull.missing > free:
        raise UserError(
            f"{name} needs {in_gb(pull.missing)} more on the disk of {place}, which has {in_gb(free)} free",
            hint="make room, or give a directory on a larger disk with --out",
        )
    return pull


def run_pull(pull: Pull, report: Callable[[int], None] = lambda arrived: None) -> Path:
    """Download what is missing, check every digest, and return the directory.

    A kill at any moment keeps what has arrived, and the next call resumes there; called once more it checks
    every file again. `report` is told how many bytes are there. Raises UserError.
    """
    headers = hub_headers()
    pull.out.mkdir(parents=True, exist_ok=True)
    with locked(pull.out, f"another srl index pull is writing to {pull.out}; wait for it to end"):
        manifest = {
            "name": pull.name,
            "repository": pull.dataset.repository,
            "revision": pull.commit,
            "files": {target.name: target.size for target in pull.targets},
            "digests": {part.name: part.digest for target in pull.targets for part in target.parts},
        }
        write_manifest(pull.out, KIND, manifest)
        done = 0
        for target in pull.targets:
            path = pull.out / target.name
            if path.exists():
                check(path, target, offset(done, report))
            else:
                fetch(target, path, headers, offset(done, report))
            done += target.size
            report(done)
    return pull.out


def _ask(
    name: str, dataset: HubDataset, revision: str | None, endpoint: str | None
) -> tuple[str, dict[str, Part]]:
    """The commit of `revision`, and its files by name."""
    hub = hub_library(f"pulling {name}")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError

    where = dataset.repository
    try:
        info = hub.HfApi(endpoint=endpoint).dataset_info(where, revision=revision, files_metadata=True)
    except RevisionNotFoundError as error:
        raise UserError(f"{where} has no revision {revision!r} on the hub") from error
    except (HfHubHTTPError, HFValidationError, httpx.HTTPError, OSError, ValueError) as error:
        raise UserError(f"the hub could not be reached for {where}: {hub_reason(error)}") from error
    at = {"repo_type": "dataset", "revision": info.sha, "endpoint": endpoint}
    parts = {
        file.rfilename: published_part(file, hub.hf_hub_url(where, file.rfilename, **at))
        for file in info.siblings or ()
        if file.rfilename not in _NOT_DOWNLOADED
    }
    return info.sha, parts


def published_part(file: Any, url: str) -> Part:
    """A file as the hub lists it. Raises UserError where size or digest is missing."""
    large = file.lfs
    size = file.size if large is None else large.size
    part = Part(file.rfilename, url, size, "" if large is None else large.sha256, file.blob_id or "")
    if size is None or not part.digest:
        raise UserError(f"{url}: the hub gives no size or no digest, so the download could not be checked")
    return part


def _targets(dataset: HubDataset, parts: dict[str, Part]) -> tuple[Target, ...]:
    """The files to write. Raises UserError where one is missing, or would be outside of --out."""
    names = dataset.files or tuple(parts)
    missing = [name for name in names if name not in parts]
    if missing or not names:
        raise UserError(
            f"{dataset.repository} lacks {', '.join(missing) or 'any file'} at this revision: it has "
            f"{', '.join(parts) or 'nothing'}"
        )
    if outside := [name for name in names if Path(name).is_absolute() or ".." in Path(name).parts]:
        raise UserError(f"{dataset.repository} has a file {outside[0]!r}, which would be outside of --out")
    if dataset.joined:
        return (Target(dataset.joined, [parts[name] for name in names]),)
    return tuple(Target(name, [parts[name]]) for name in names)


def in_gb(size: int) -> str:
    """`64.6 GB`; small sizes in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def hub_headers() -> dict[str, str]:
    """The hub's own headers. The token in them is not passed on when the hub redirects to another host."""
    hub_library("a pull")
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="srl")


def offset(before: int, report: Callable[[int], None]) -> Callable[[int], None]:
    """Report bytes on top of those `before`."""
    return lambda arrived: report(before + arrived)
