"""Manifests: `manifest.json` in a directory says its kind, its files and their checksums.

They prevent replacing other people's files, and using damaged ones.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from srl.errors import UserError
from srl.files import FORMAT, Replace, check_format, digest_file, json_object, write_json

Report = Callable[[int], None]
MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint"
ABOUT = "srl.json"
"""The description of a checkpoint or model, next to its weights."""
HAS_MANIFEST = {"manifest": True}
"""Entry in a checkpoint's `srl.json`: the checkpoint has a manifest. Older versions wrote neither."""


def write_manifest(directory: Path | str, kind: str, payload: Mapping[str, Any]) -> None:
    """Write `manifest.json` into `directory`: `{"format": 1, "kind": kind, …payload}`."""
    write_json(Path(directory) / MANIFEST, {"format": FORMAT, "kind": kind, **payload})


def read_manifest(path: Path | str, kind: str) -> dict[str, Any]:
    """The manifest of the directory `path`. Raises UserError if it is not of `kind` or is newer than this
    srl."""
    file = Path(path) / MANIFEST
    if not file.is_file():
        there = "is a file" if Path(path).exists() else "does not exist"
        what = f"has no {MANIFEST}" if Path(path).is_dir() else there
        raise UserError(f"{path} is not a directory of kind {kind!r}: it {what}")
    manifest = json_object(file.read_bytes(), str(file))
    if manifest.get("kind") != kind:
        raise UserError(f"{path}: expected a directory of kind {kind!r}, found {manifest.get('kind')!r}")
    check_format(file, manifest.get("format"))
    return manifest


def files_in(directory: Path) -> list[str]:
    """The files in `directory` except its manifest, as sorted relative paths; links are not followed."""
    found = []
    for folder, folders, names in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        found += [Path(folder, name).relative_to(directory).as_posix() for name in (*names, *links)]
    return sorted(name for name in found if name != MANIFEST)


def replaceable(
    kind: str, called: str, older: Collection[str] = (), besides: Collection[str] = ()
) -> Replace:
    """A `Replace` for directories with a manifest of `kind` and no other files than those listed there.

    `called` is the kind in words, such as "an index". `older` are the files allowed if the manifest of an
    older version lists none; `besides` are allowed always.
    """

    def check(path: Path) -> None:
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path} is not {called} (it has no {MANIFEST} of srl) and is not replaced; "
                "choose another directory, or remove it first"
            )
        ours = read_manifest(path, kind).get("files", older)
        foreign = next((name for name in files_in(path) if name not in (*ours, *besides)), None)
        if foreign is not None:
            raise UserError(
                f"{path} is not replaced: srl did not write {foreign} in it; move that file, "
                "or choose another directory"
            )

    return check


class DamagedError(UserError):
    """A file is missing, or its content has changed."""


def checksums(directory: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """The checksums of the files `names` in `directory`; default: all files except its manifest."""
    names = files_in(directory) if names is None else names
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(directory / name), names), strict=True))


def check_files(directory: Path, expected: Mapping[str, str], report: Report | None = None) -> None:
    """Read every file in `expected`. Raises DamagedError if one is missing or has another checksum."""

    def check(name: str) -> None:
        path = directory / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        if digest_file(path, report) != expected[name]:
            raise DamagedError(f"{path} is damaged: its checksum differs from the recorded one")

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, expected))


def check_checkpoint(path: Path, leave_out: str = "") -> None:
    """Verify the checksums of a checkpoint, except files whose names begin with `leave_out`.

    Raises DamagedError that names the previous checkpoint. Other directories pass, and so do checkpoints of
    versions without checksums (`is_checked` is False for both).
    """
    try:
        if not is_checked(path):
            _refuse_lost_manifest(path)
            return
        found = json.loads((path / MANIFEST).read_bytes())
        if isinstance(found, dict) and found.get("kind") == CHECKPOINT:
            files = read_manifest(path, CHECKPOINT).get("files", {})
            kept = {name: files[name] for name in files if not (leave_out and name.startswith(leave_out))}
            check_files(path, kept)
    except DamagedError as error:
        raise DamagedError(f"{error}{before(path)}") from error
    except ValueError as error:
        if _is_resumable(path):
            why = f"damaged: {error}" if (path / MANIFEST).stat().st_size else "empty"
            raise DamagedError(f"{path / MANIFEST} is {why}{before(path)}") from error


def is_checked(path: Path) -> bool:
    """Whether a directory has a manifest."""
    return (path / MANIFEST).is_file()


def _is_resumable(path: Path) -> bool:
    """Whether a directory holds trainer state, of the local backend or verl."""
    return (path / "trainer").is_dir() or (path / "actor").is_dir()


def _refuse_lost_manifest(path: Path) -> None:
    if not _is_resumable(path) or not (path / ABOUT).is_file():
        return
    try:
        known = json.loads((path / ABOUT).read_bytes())
    except ValueError as error:
        raise DamagedError(f"{path / ABOUT} is damaged: {error}") from error
    if isinstance(known, dict) and HAS_MANIFEST.items() <= known.items():
        raise DamagedError(f"{path / MANIFEST} is missing, so the checkpoint cannot be checked for damage")


def before(path: Path) -> str:
    """The end of a message that names the newest checkpoint before `path`, or says that there is none."""
    name = re.compile(r"(\D+)(\d+)")
    own = name.fullmatch(path.name)
    if own is None:
        return ""
    others = (name.fullmatch(other.name) for other in path.parent.iterdir())
    older = {int(m[2]): m[0] for m in others if m and m[1] == own[1] and int(m[2]) < int(own[2])}
    return f"; the checkpoint before it is {older[max(older)] if older else 'none'}"
