"""The manifest of an index: its corpus, retriever and parameters, and the checksums of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import digest_text
from srl.manifests import MANIFEST, read_manifest, write_manifest

KIND = "index"
RECORD = ".verified.json"
"""The record that all files were verified. It holds for one copy of the index and is not one of its files."""
_EDGE = 1 << 16
_KINDS: dict[str, type] = {"str": str, "int": int}
_NAMES = {str: "a text", int: "a whole number", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The identity of an index. `digest` covers corpus, retriever and parameters, and nothing else.

    `files` maps each file to a mark (size and digest of both ends), which is cheap to check; `checksums`
    cover all bytes and are missing in an index of an older version.
    """

    retriever: str
    options: Mapping[str, Any]
    passages: int
    corpus: str
    corpus_digest: str
    digest: str
    created: str
    srl_version: str
    retriever_version: str
    files: Mapping[str, str] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    checksums: Mapping[str, str] = field(default_factory=dict)
    format: int = 1
    kind: str = KIND

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(int(mark.partition("-")[0]) for mark in self.files.values())

    def write(self, directory: Path) -> None:
        payload = asdict(self)
        write_manifest(directory, payload.pop("kind"), payload)


def index_digest(
    corpus_digest: str, retriever: str, options: Mapping[str, Any], identity: Mapping[str, str] | None = None
) -> str:
    """32 hex digits, the same on every machine for the same corpus, retriever and build parameters."""
    parts = [dict(options), *([dict(identity)] if identity else [])]
    return digest_text(KIND, corpus_digest, retriever, *(json.dumps(part, sort_keys=True) for part in parts))


def read_index_manifest(directory: Path | str) -> Manifest:
    """The manifest of an index directory. Raises UserError where it is missing, damaged or newer."""
    directory = Path(directory)
    found = read_manifest(directory, KIND)
    expected = {item.name for item in fields(Manifest)}
    missing = sorted(expected - set(found) - {"identity", "checksums"})
    if missing:
        raise UserError(f"{directory / MANIFEST}: {', '.join(missing)} missing; build the index again")
    manifest = Manifest(**{name: found[name] for name in expected & set(found)})
    _check_fields(directory, manifest)
    _check_checksums(directory, manifest)
    _check_identity(directory, manifest)
    return manifest


def _check_fields(directory: Path, manifest: Manifest) -> None:
    """Check the types of the fields, and that an index with passages has files."""
    for item in fields(Manifest):
        value, kind = getattr(manifest, item.name), _KINDS.get(str(item.type), dict)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(
                f"{directory / MANIFEST}: {item.name} must be {_NAMES[kind]}, found {str(value)!r:.40}; "
                "build the index again"
            )
    if manifest.passages < 0 or (manifest.passages and not manifest.files):
        raise UserError(
            f"{directory / MANIFEST}: {manifest.passages} passages in {len(manifest.files)} files (edited?); "
            "build the index again"
        )


def _check_checksums(directory: Path, manifest: Manifest) -> None:
    """Every file has a checksum, or none has."""
    if manifest.checksums and manifest.checksums.keys() != manifest.files.keys():
        raise UserError(
            f"{directory / MANIFEST}: files and checksums do not match (edited?); build the index again"
        )


def _check_identity(directory: Path, manifest: Manifest) -> None:
    """Check the digest against the other fields, which shows whether the manifest was edited."""
    identity = index_digest(manifest.corpus_digest, manifest.retriever, manifest.options, manifest.identity)
    if manifest.digest != identity:
        raise UserError(
            f"{directory / MANIFEST}: expected digest {identity[:12]}, found {manifest.digest[:12]} "
            "(edited?); build the index again"
        )


def mark_files(directory: Path, leave_out: Collection[str] = ()) -> dict[str, str]:
    """Size and digest of the first and last 64 KiB of every file below `directory`, by relative path."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            if (known := path.relative_to(directory).as_posix()) not in leave_out:
                found[known] = _mark(path)
    return dict(sorted(found.items()))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise UserError unless every file exists with the size and both ends that the manifest names."""
    for name, mark in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing: the index is incomplete; copy or build it again")
        if _mark(path) != mark:
            raise UserError(
                f"{path} is damaged or from another index (expected {mark}, found {_mark(path)}); "
                "copy or build it again"
            )


def _mark(path: Path) -> str:
    """`<bytes>-<16 hex digits>`: the size, and the digest of the first and last 64 KiB."""
    digest, size = blake2b(digest_size=8), path.stat().st_size
    with open(path, "rb") as file:
        digest.update(file.read(_EDGE))
        if size > _EDGE:
            file.seek(max(_EDGE, size - _EDGE))
            digest.update(file.read(_EDGE))
    return f"{size}-{digest.hexdigest()}"
