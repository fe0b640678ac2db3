"""What an index says about itself: from which corpus, by which retriever, with which parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import MANIFEST, digest_text, read_manifest, write_manifest

KIND = "index"
RECORD = ".verified.json"
"""The record of when the files were last read whole; it belongs to no copy, and is none of them."""
_EDGE = 1 << 16
_KINDS: dict[str, type] = {"str": str, "int": int}
_NAMES = {str: "a text", int: "a whole number", dict: "an object"}


@dataclass(frozen=True, slots=True)
class Manifest:
    """The identity of an index. `digest` covers corpus, retriever and parameters, and nothing else.

    `files` has a mark of each file, cheap to check, and `checksums` the checksum of all its bytes; there are
    none of these in an index that an older version built.
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
    """32 hex digits that are the same for the same corpus, retriever and build parameters, anywhere."""
    parts = [dict(options), *([dict(identity)] if identity else [])]
    return digest_text(KIND, corpus_digest, retriever, *(json.dumps(part, sort_keys=True) for part in parts))


def read_index_manifest(directory: Path | str) -> Manifest:
    """The manifest of an index directory. Raises UserError where it is missing, newer or damaged."""
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
    """What other code relies on: the fields have their types, and an index with passages has files."""
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
            f"{directory / MANIFEST}: its checksums are not of its files (edited?); build the index again"
        )


def _check_identity(directory: Path, manifest: Manifest) -> None:
    """The digest must be that of the other fields, so an edited manifest is noticed."""
    identity = index_digest(manifest.corpus_digest, manifest.retriever, manifest.options, manifest.identity)
    if manifest.digest != identity:
        raise UserError(
            f"{directory / MANIFEST}: the digest does not fit the rest (edited?); build the index again"
        )


def mark_files(directory: Path, leave_out: str = "") -> dict[str, str]:
    """Size and digest of the first and last 64 KiB of every file below `directory`, by relative path."""
    found = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            found[path.relative_to(directory).as_posix()] = _mark(path)
    found.pop(leave_out, None)
    return dict(sorted(found.items()))


def check_files(directory: Path, manifest: Manifest) -> None:
    """Raise UserError unless every file of the index is there and, as far as its ends tell, unchanged."""
    for name, mark in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise UserError(f"{path} is missing: the index is not whole; copy or build it again")
        if _mark(path) != mark:
            raise UserError(
                f"{path} is not the file that the index was built with (truncated, or from another index); "
                "copy or build it again"
            )


def _mark(path: Path) -> str:
    """`<bytes>-<16 hex digits>`; cheap however large the file is."""
    digest, size = blake2b(digest_size=8), path.stat().st_size
    with open(path, "rb") as file:
        digest.update(file.read(_EDGE))
        if size > _EDGE:
            file.seek(max(_EDGE, size - _EDGE))
            digest.update(file.read(_EDGE))
    return f"{size}-{digest.hexdigest()}"
