"""Gives a run a local directory for each model: downloaded from the Hugging Face hub, or made of a GGUF file.

The hub's cache has the layout of huggingface_hub, which also writes the small files there. Large files are
downloaded by `srl.index.download`, which resumes and checks digests, into the same cache.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from srl.config import Config
from srl.data.hub import hub_library
from srl.errors import UserError
from srl.files import is_disk_full
from srl.hub_models import HubName, cache, has_weights, hub_reason, is_gguf
from srl.index.download import Part, Target, fetch, partial
from srl.index.pull import hub_headers, in_gb, offset, published_part
from srl.model import check_code, quietly
from srl.progress import counted
from srl.train.convert_gguf import converted
from srl.train.make_missing import Note
from srl.workspace import Workspace

What = Literal["model", "tokenizer", "config"]
"""What of a repository is wanted: all that training needs, the tokenizer, or `config.json`."""
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
_SMALL = (".json", ".txt", ".model", ".jinja")
_TIMEOUT_S = 10.0


def with_local_models(config: Config, workspace: Workspace, note: Note) -> Config:
    """`config` with a directory for each model that it names on the hub or gives as a GGUF file.

    What is missing is fetched or converted once, and `note` is told. An existing directory takes precedence
    over a name. Raises UserError.
    """
    model, found = config.model, dict[str, str]()
    for key, path, what in _models(config):
        if is_gguf(path):
            found[key] = str(converted(Path(path), workspace, model, note))
        elif name := HubName.parse(path):
            found[key] = str(fetched(name, what, note, trust_remote_code=model.trust_remote_code))
    return config.with_settings(found) if found else config


def fetch_config(path: str | Path, trust_remote_code: bool) -> Path:
    """A directory with the `config.json` of the model `path` on the hub: all that a dry run needs."""
    name = HubName.parse(path)
    assert name is not None, "the path of a directory needs no description"
    return fetched(name, "config", lambda text: None, trust_remote_code=trust_remote_code)


def with_cached_models(config: Config) -> Config:
    """`config` with a directory for each model that the hub's cache has whole, for a dry run. No network."""
    found = {}
    for key, path, what in _models(config):
        name = HubName.parse(path)
        snapshot = name.snapshot() if name else None
        if snapshot is not None and _is_whole(snapshot, what):
            found[key] = str(snapshot)
    return config.with_settings(found) if found else config


def _models(config: Config) -> Iterator[tuple[str, str, What]]:
    """The keys that name a model, with what is wanted of each: no weights where a server has them."""
    if config.model.path is not None:
        yield "model.path", config.model.path, "tokenizer" if config.rollout.engine == "openai" else "model"
    if config.model.tokenizer is not None:
        yield "model.tokenizer", config.model.tokenizer, "tokenizer"
    if config.ref.path is not None and config.needs_reference:
        yield "ref.path", config.ref.path, "model"


def fetched(name: HubName, what: What, note: Note, *, trust_remote_code: bool = False) -> Path:
    """The directory of a model on the hub, in the hub's cache. Raises UserError.

    The hub is asked which commit the revision is; where it is pinned, or the hub is out of reach, a whole
    copy in the cache will do. Size and licence are told to `note` before a download of weights.
    """
    found = name.snapshot()
    is_whole = found is not None and _is_whole(found, what)
    if found is not None and is_whole and name.is_pinned:
        return found
    try:
        listing = _ask(name, trust_remote_code)
    except _UnreachableError as error:
        if found is None or not is_whole:
            raise UserError(str(error)) from error
        if not _is_offline():
            note(f"the hub could not be reached: using {name} at {found.name[:12]} from its cache")
        return found
    return _complete(listing, what, note, trust_remote_code)


class _UnreachableError(UserError):
    """The hub was not asked, or did not answer."""


@dataclass(frozen=True, slots=True)
class _Listing:
    """A revision of a repository: its files that matter here, and what to tell about it."""

    name: HubName
    commit: str
    licence: str
    small: tuple[Part, ...]
    weights: tuple[Part, ...]
    others: tuple[str, ...]

    @property
    def snapshot(self) -> Path:
        return self.name.folder / "snapshots" / self.commit

    def blob(self, part: Part) -> Path:
        return self.name.folder / "blobs" / part.digest

    def missing(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if not (self.snapshot / part.name).exists()]

    def left(self, parts: Sequence[Part]) -> int:
        """Bytes of `parts` that have not arrived yet."""
        arrived = [
            next((file.stat().st_size for file in (path, partial(path)) if file.is_file()), 0)
            for path in map(self.blob, parts)
        ]
        return sum(max(0, part.size - have) for part, have in zip(parts, arrived, strict=True))


def _complete(listing: _Listing, what: What, note: Note, trust_remote_code: bool) -> Path:
    """Download what is missing of `listing`; returns its snapshot. Small files come first, so a snapshot that
    has its weights is complete."""
    small = [
        part for part in listing.small
        if what != "config" or part.name == "config.json" or part.name.endswith(".py")
    ]  # fmt: skip
    weights = listing.weights if what == "model" else ()
    if what == "model":
        _check_weights(listing)
    missing = [*listing.missing(small), *listing.missing(weights)]
    if not missing:
        return listing.snapshot
    if what == "model":
        size = f"{in_gb(listing.left(missing))} to download, licence {listing.licence}"
        note(f"fetching {listing.name} at {listing.commit[:12]}: {size}, to {listing.snapshot}")
        _check_room(listing, missing)
    with _errors_of(listing.name), quietly():
        _into_snapshot(listing, small)
        check_code(listing.snapshot, trust_remote_code)
        _fetch_weights(listing, weights)
        _into_snapshot(listing, weights)
    return listing.snapshot


def _fetch_weights(listing: _Listing, weights: Sequence[Part]) -> None:
    """Download weights to the cache; what has arrived is kept, and the next call continues there."""
    done = 0
    with _locked(listing.name.folder), counted("bytes", sum(part.size for part in weights)) as count:
        for part in weights:
            if not listing.blob(part).exists():
                fetch(Target(part.name, [part]), listing.blob(part), hub_headers(), offset(done, count))
            done += part.size
            count(done)


def _into_snapshot(listing: _Listing, parts: Sequence[Part]) -> None:
    """Have huggingface_hub put files into the snapshot, downloaded where the cache lacks them."""
    hub = hub_library(f"fetching {listing.name}")
    if listing.missing(parts):
        names = [part.name for part in parts]
        hub.snapshot_download(listing.name.repository, revision=listing.commit, allow_patterns=names)
    if not listing.name.is_pinned:
        ref = listing.name.folder / "refs" / listing.name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(listing.commit, encoding="utf-8")


def _is_whole(snapshot: Path, what: What) -> bool:
    """Whether the cache has what is wanted, as far as that can be seen without the hub."""
    if what == "model":
        return (snapshot / "config.json").is_file() and has_weights(snapshot)
    if what == "config":
        return (snapshot / "config.json").is_file()
    return any((snapshot / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _ask(name: HubName, trust_remote_code: bool) -> _Listing:
    """What the hub has at the revision. Raises UserError; _UnreachableError where it could not be asked."""
    hub = hub_library(f"fetching {name}")
    where = f"no model directory {name}"
    if _is_offline():
        raise _UnreachableError(
            f"{where}, no whole copy in the hub's cache ({cache()}), and HF_HUB_OFFLINE is set: unset it to "
            "download the model, or give a directory"
        )
    with _errors_of(name):
        info = hub.HfApi().model_info(
            name.repository, revision=name.revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    top = [each for each in info.siblings or () if "/" not in each.rfilename]
    endings = (*_SMALL, ".py") if trust_remote_code else _SMALL
    small = [each for each in top if each.rfilename.endswith(endings)]
    tensors = [each for each in top if each.rfilename.endswith(".safetensors")]
    weights = [each for each in tensors if _SHARD.fullmatch(each.rfilename)] or tensors

    def parts(files: Sequence[Any]) -> tuple[Part, ...]:
        return tuple(
            published_part(each, hub.hf_hub_url(name.repository, each.rfilename, revision=info.sha))
            for each in files
        )

    licence = next((tag[8:] for tag in info.tags or () if tag.startswith("license:")), "not stated")
    others = tuple(each.rfilename for each in info.siblings or ())
    return _Listing(name, info.sha, licence, parts(small), parts(weights), others)


def _check_weights(listing: _Listing) -> None:
    """Raises UserError for a repository without weights that are loaded, or without the model they are of."""
    if listing.weights and "config.json" not in listing.others:
        what = "a LoRA adapter" if "adapter_config.json" in listing.others else "not a model of transformers"
        raise UserError(f"{listing.name} has no config.json on the hub, so it is {what}; give a model's name")
    if listing.weights:
        return
    gguf = next((name for name in listing.others if is_gguf(name)), None)
    repository = listing.name.repository
    instead = f"; type: hf download {repository} {gguf} --local-dir DIR, and give DIR/{gguf}" if gguf else ""
    raise UserError(
        f"{listing.name} has no *.safetensors file on the hub; other formats can run code and are not "
        f"loaded{instead}"
    )


def _check_room(listing: _Listing, missing: Sequence[Part]) -> None:
    """Raises UserError unless the disk has space for what is missing."""
    where = next(folder for folder in (listing.snapshot, *listing.snapshot.parents) if folder.exists())
    left, free = listing.left(missing), shutil.disk_usage(where).free
    if left > free:
        raise UserError(
            f"{listing.name} needs {in_gb(left)} more on the disk of {where}, which has {in_gb(free)} free; "
            "make room, or set HF_HOME to a directory on a larger disk"
        )


@contextmanager
def _errors_of(name: HubName) -> Iterator[None]:
    """One line for each error of the hub and its library, with what to type."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    page = f"{constants.ENDPOINT}/{name.repository}"
    try:
        yield
    except GatedRepoError as error:
        raise UserError(
            f"{name.repository} is gated: accept its terms at {page}, and set HF_TOKEN to a token of that "
            "account"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"no model directory {name}, and no model of this name at {page}; check the spelling, or set "
            "HF_TOKEN if it is private"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(
            f"{name.repository} has no revision {name.revision!r}; leave it out, or see {page}/commits/main"
        ) from error
    except HFValidationError as error:
        raise UserError(f"no model directory {name}, and {hub_reason(error)}") from error
    except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError) as error:
        raise _explained(name, error) from error


def _explained(name: HubName, error: Exception) -> UserError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return UserError(
            f"the hub denies access to {name.repository} (status {status}); set HF_TOKEN to a valid token of "
            "an account that has it"
        )
    if isinstance(error, OSError) and is_disk_full(error):
        return UserError(
            f"the disk of {cache()} is full; free some space and type the same command again, or set HF_HOME "
            "to a directory on a larger disk"
        )
    return _UnreachableError(
        f"no model directory {name}, and the hub could not be reached ({hub_reason(error)}); type the same "
        "command again to continue the download, or give a directory"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other run downloads weights of this repository."""
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "blobs", os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
