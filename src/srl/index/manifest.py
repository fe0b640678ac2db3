"""The manifest of an index: its corpus, retriever and parameters, and the size and checksum of each file."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from srl.errors import UserError, expected
from srl.files import MANIFEST, DamagedError, check_files, digest_text, read_manifest, write_manifest

KIND = "index"


class Manifest(BaseModel):
    """The identity of an index. `digest` covers corpus, retriever and parameters, and nothing else.

    `files` maps each file to its size in bytes, `checksums` to the digest of its content.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    kind: Literal["index"] = "index"
    retriever: str
    options: dict[str, Any]
    passages: NonNegativeInt
    corpus: str
    corpus_digest: str
    digest: str
    created: str
    srl_version: str
    retriever_version: str
    identity: dict[str, str] = {}
    files: dict[str, NonNegativeInt]
    checksums: dict[str, str]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(self.files.values())

    def write(self, directory: Path) -> None:
        """Write it into the index at `directory`."""
        write_manifest(directory, KIND, self.model_dump(exclude={"format", "kind"}))


def index_digest(
    corpus_digest: str, retriever: str, options: Mapping[str, Any], identity: Mapping[str, str] | None = None
) -> str:
    """32 hex digits, the same on every machine for the same corpus, retriever and build parameters."""
    parts = [dict(options), *([dict(identity)] if identity else [])]
    return digest_text(KIND, corpus_digest, retriever, *(json.dumps(part, sort_keys=True) for part in parts))


def read_index_manifest(directory: Path | str) -> Manifest:
    """The manifest of an index directory. Raises UserError where it is missing, damaged or edited."""
    path = Path(directory) / MANIFEST
    try:
        manifest = Manifest.model_validate(read_manifest(directory, KIND))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path}: {where}: {expected(first)}", hint="build the index again") from error
    digest = index_digest(manifest.corpus_digest, manifest.retriever, manifest.options, manifest.identity)
    whole = manifest.files.keys() == manifest.checksums.keys() and (manifest.files or not manifest.passages)
    if manifest.digest != digest or not whole:
        raise UserError(f"{path} was edited: digest or files do not match", hint="build the index again")
    return manifest


def check_index(directory: Path | str) -> Manifest:
    """The manifest. Raises UserError unless every file is there with its size."""
    manifest = read_index_manifest(directory)
    for name, size in manifest.files.items():
        path = Path(directory, name)
        if not path.is_file():
            raise UserError(f"{path} is missing", hint="copy or build the index again")
        if path.stat().st_size != size:
            raise UserError(
                f"{path} is damaged: expected {size:,} bytes, found {path.stat().st_size:,}",
                hint="copy or build the index again",
            )
    return manifest


def verify(directory: Path, manifest: Manifest) -> None:
    """Compare the checksum of every file. Raises UserError where a file is damaged."""
    try:
        check_files(directory, manifest.checksums)
    except DamagedError as error:
        raise UserError(f"{error}", hint="copy or build the index again") from error


def sizes_of(directory: Path, leave_out: Collection[str] = ()) -> dict[str, int]:
    """The size of every file below `directory`, by relative path."""
    sizes = {}
    for folder, _, names in os.walk(directory):
        for path in (Path(folder, name) for name in names):
            sizes[path.relative_to(directory).as_posix()] = path.stat().st_size
    return {name: sizes[name] for name in sorted(sizes) if name not in leave_out}
