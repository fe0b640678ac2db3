"""Search-R1's published indexes and corpus, downloaded with huggingface_hub (an optional install)."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from srl.data.hub import hub_library
from srl.errors import UserError, nearest
from srl.models.hub import hub_reason

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
    """What is to be downloaded, at which commit, and where to; sizes in bytes."""

    dataset: HubDataset
    out: Path
    commit: str
    sizes: dict[str, int]
    missing: int

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    @property
    def files(self) -> list[str]:
        """The files once they are there, below `out`."""
        return [self.dataset.joined] if self.dataset.joined else list(self.sizes)

    def in_words(self, text: str) -> str:
        """`text` of the data set with the directory and the size."""
        return text.format(out=self.out, size=f"{self.size / 1e9:.0f}")


def plan_pull(name: str, out: Path, revision: str | None = None, endpoint: str | None = None) -> Pull:
    """Ask the hub which files `name` has, without writing anything.

    Raises UserError for an unknown name, for a hub that cannot be reached or lacks a file, and for a disk
    that is too small.
    """
    dataset = HUB_DATASETS.get(name)
    if dataset is None:
        names = ", ".join(HUB_DATASETS)
        raise UserError(f"no index {name!r} to pull: there are {names}{nearest(name, list(HUB_DATASETS))}")
    files = _snapshot(dataset, out, revision, endpoint, dry_run=True)
    if absent := set(dataset.files) - {each.filename for each in files}:
        raise UserError(f"{dataset.repository} lacks {', '.join(sorted(absent))} at this revision")
    is_whole = bool(dataset.joined) and (out / dataset.joined).is_file()
    missing = 0 if is_whole else sum(each.file_size for each in files if each.will_download)
    sizes = {each.filename: each.file_size for each in files}
    size = missing + sum(sizes[part] for part in dataset.files[1:] if not is_whole)  # which are joined
    free = shutil.disk_usage(next(each for each in (out, *out.absolute().parents) if each.exists())).free
    if size > free:
        what = f"{name} needs {in_gb(size)} more on the disk of {out}, which has {in_gb(free)} free"
        raise UserError(what, hint="make room, or give a directory on a larger disk with --out")
    return Pull(dataset, out, files[0].commit_hash, sizes, missing)


def run_pull(pull: Pull, endpoint: str | None = None) -> None:
    """Download what is missing; called again after a kill, files that are whole are not downloaded again.

    Raises UserError.
    """
    joined = pull.out / pull.dataset.joined
    if pull.dataset.joined and joined.is_file():
        return
    _snapshot(pull.dataset, pull.out, pull.commit, endpoint)
    if pull.dataset.joined:
        first, *parts = (pull.out / name for name in pull.dataset.files)
        for part in parts:
            with open(first, "ab") as whole, open(part, "rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)
            part.unlink()
        first.rename(joined)


def _snapshot(
    dataset: HubDataset, out: Path, revision: str | None, endpoint: str | None, dry_run: bool = False
) -> Any:
    """The library's own download of the data set into `out`, or its plan. Raises UserError."""
    hub = hub_library(f"pulling {dataset.repository}")
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return hub.snapshot_download(
            dataset.repository, repo_type="dataset", revision=revision, local_dir=out, endpoint=endpoint,
            allow_patterns=list(dataset.files) or None, ignore_patterns=_NOT_DOWNLOADED, dry_run=dry_run,
        )  # fmt: skip
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        suffix = f" at {revision}" if revision else ""
        what = f"the hub did not give {dataset.repository}{suffix}: {hub_reason(error)}"
        raise UserError(what, hint="the same command goes on with the files that are missing") from error


def in_gb(size: int) -> str:
    """`64.6 GB`; small sizes in MB."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
