"""Names of models on the Hugging Face hub, and where its cache on this machine keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Literal

from srl.errors import UserError, first_line

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
What = Literal["model", "tokenizer", "config"]
"""What of a repository is wanted: all that training needs, the tokenizer, or `config.json`."""
NEEDED: dict[What, tuple[str, ...]] = {
    "model": ("config.json", "*.safetensors"),
    "tokenizer": ("tokenizer*.json",),
    "config": ("config.json",),
}
BESIDE = ("*.json", "*.txt", "*.model", "*.jinja")
"""Fetched with a model and with a tokenizer."""


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME` or `ORG/NAME@REVISION`; the revision is a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str | Path) -> HubName | None:
        """The name that `text` is; None for a path, as what exists is."""
        match = _NAME.fullmatch(str(text))
        if match is None or Path(text).exists():
            return None
        return cls(match[1], match[2] or "main")

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"

    def snapshot(self, what: What | None = None) -> Path | None:
        """The directory of this revision in the hub's cache, where it has `what` is wanted of it."""
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(self.repository, "config.json", cache(), self.revision)
        folder = Path(file).parent if isinstance(file, str) else None
        return folder if folder and has_needed(folder, what) else None


def cache() -> Path:
    """The hub's cache: $HF_HUB_CACHE, or below $HF_HOME."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def hub_name(path: str | Path | None) -> str:
    """`ORG/NAME@COMMIT` for a snapshot in the hub's cache; empty for anything else."""
    folder = Path(path or "")
    repository, kind = folder.parent.parent, folder.parent.name
    if kind != "snapshots" or not _COMMIT.fullmatch(folder.name) or repository.parent != cache():
        return ""
    return f"{repository.name.removeprefix('models--').replace('--', '/', 1)}@{folder.name}"


def cached(text: str) -> str:
    """The snapshot's directory for a name that is in the hub's cache; any other text as it is."""
    name = HubName.parse(text)
    return str((name and name.snapshot()) or text)


def fetched(name: HubName, what: What, *, trust_remote_code: bool = False) -> Path:
    """The directory of a model on the hub, in the hub's cache, downloaded where it is not there.

    The hub is asked which commit the revision is; where it is out of reach, the cache's copy will do. Code is
    downloaded only if it is trusted. Raises UserError.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    patterns = [*NEEDED[what], *([] if what == "config" else BESIDE)]
    patterns += ["*.py"] if trust_remote_code else []
    try:
        folder = Path(
            snapshot_download(
                name.repository,
                revision=name.revision,
                allow_patterns=patterns,
                ignore_patterns=["*/*", "consolidated*"],  # of other programs
            )
        )
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
        hint = "type the same command again, or give a directory"
        if isinstance(error, GatedRepoError):
            hint = f"accept its terms at {constants.ENDPOINT}/{name.repository}, and set HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            hint = "check the spelling, or set HF_TOKEN if it is private"
        what_failed = f"no model directory {name}, and the hub did not give it: {hub_reason(error)}"
        raise UserError(what_failed, hint=hint) from error
    if not has_needed(folder, what):
        raise UserError(
            f"{name} is not whole on the hub or in its cache ({cache()}): no {' or '.join(NEEDED[what])}",
            hint="give a model of transformers, or a directory",
        )
    return folder


def hub_reason(error: Exception) -> str:
    """The first line of an error of the library huggingface_hub, shortened."""
    return shorten(first_line(error), 120, placeholder=" …").rstrip(" .")


def has_needed(folder: Path, what: What | None) -> bool:
    """Whether there are files of each kind that is needed."""
    return all(any(folder.glob(pattern)) for pattern in (NEEDED[what] if what else ()))
