"""Names of models on the Hugging Face hub, and where its cache on this machine keeps them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from srl.errors import UserError, first_line

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
_WEIGHTS = ("model.safetensors.index.json", "model.safetensors")


def is_gguf(path: str | Path) -> bool:
    """Whether `path` is meant as a GGUF file, by its name."""
    return str(path).lower().endswith(".gguf")


@dataclass(frozen=True, slots=True)
class HubName:
    """`ORG/NAME` or `ORG/NAME@REVISION`; the revision is a branch, a tag or a commit."""

    repository: str
    revision: str = "main"

    @classmethod
    def parse(cls, text: str | Path) -> HubName | None:
        """The name that `text` is; None for a path: what exists, and GGUF files, are paths."""
        found = _NAME.fullmatch(str(text))
        if found is None or Path(text).exists() or is_gguf(text):
            return None
        return cls(found[1], found[2] or "main")

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def folder(self) -> Path:
        """The repository's folder in the hub's cache."""
        return cache() / f"models--{self.repository.replace('/', '--')}"

    def snapshot(self) -> Path | None:
        """The files of this revision in the cache, where there are any."""
        ref = self.folder / "refs" / self.revision
        commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else self.revision
        found = self.folder / "snapshots" / commit
        return found if _COMMIT.fullmatch(commit) and found.is_dir() else None


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
    """The snapshot's directory for a pinned name that is in the hub's cache; any other text as it is."""
    name = HubName.parse(text)
    found = name.snapshot() if name is not None and name.is_pinned else None
    return text if found is None else str(found)


def local_copy(model: str, trust_remote_code: bool, setting: str = "") -> Path:
    """The directory `model`, or the hub's model of this name in the hub's cache, downloaded if necessary.

    Only safetensors, configuration and tokenizer are downloaded, and code if it is
    trusted. Raises UserError, with the name of the `setting` that has the model.
    """
    name = HubName.parse(model)
    if name is None:
        return Path(model)
    import httpx
    from huggingface_hub import snapshot_download

    kinds = [*_FILES, "*.py"] if trust_remote_code else _FILES
    try:
        found = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[*kinds],
            ignore_patterns=["onnx/*", "openvino/*"],
        )
    except (httpx.HTTPError, OSError, ValueError) as error:
        then = f", and --set {setting}=DIRECTORY" if setting else ""
        raise UserError(
            f"no directory {model}, and the hub's model could not be downloaded ({hub_reason(error)}); "
            f"type: hf download {name.repository} --local-dir DIRECTORY{then}"
        ) from error
    return Path(found)


def hub_reason(error: Exception) -> str:
    """The first line of an error of the library huggingface_hub, shortened."""
    return first_line(error)[:120].rstrip(" .")


def has_weights(snapshot: Path) -> bool:
    """Whether all weight files are there, as far as the directory itself says which there are."""
    from json import loads

    if (index := snapshot / _WEIGHTS[0]).is_file():
        shards = set(loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        return all((snapshot / shard).is_file() for shard in shards)
    return any(snapshot.glob("*.safetensors"))
