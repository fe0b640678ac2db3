"""Files that appear whole or not at all, their digests, JSON, manifests, and the inputs of commands.

Unfinished output is written next to its target, in a hidden directory that names the host, that a file marks
as ours and that its writer holds locked. The next writer of the host removes what dead ones left behind, and
nothing without the mark.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import socket
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, TypeVar, cast

from srl.errors import UserError, parsing

T = TypeVar("T")
FORMAT = 1
"""The format number in every file and directory that srl writes."""
MARK = ".srl-unfinished"
"""The file that marks a directory whose content may be removed once its process is dead."""
MANIFEST = "manifest.json"
CHECKPOINT = "checkpoint"
"""The kind of a checkpoint's manifest."""
ABOUT = "srl.json"
"""The description of a checkpoint or model, next to its weights."""

_ASIDE = re.compile(r"^\.(?P<name>.+)\.tmp-(?P<host>[\w.]+)-[0-9a-f]{8}$")
_FULL = {errno.ENOSPC, errno.EDQUOT}
_BLOCK = 4096
_HEAD = 1 << 20
_TAR = slice(257, 262)
"""Position of the magic number of a tar archive."""

Replace = Callable[[Path], None]
"""Called with a path before it is replaced; raises UserError if it must not be."""


class NotWritten(UserError):  # noqa: N818 - what happened, as in CheckFailed
    """A file was not written because the disk is full."""


class DamagedError(UserError):
    """A file is missing, or its content has changed."""


# ---- Written whole or not at all


@contextmanager
def atomic_directory(path: Path | str, *, replace: Replace | None = None) -> Iterator[Path]:
    """A temporary directory that is renamed to `path` when the block ends without an error.

    On any error, Ctrl-C included, it is removed. An existing `path` is replaced if `replace` allows it, else
    refused before anything is written; an empty directory is always replaced. Raises UserError, also if the
    disk is full.

    A temporary directory is given as it is: what it is for is written whole or not at all.
    """
    if target_of(path) != Path(path):
        yield Path(path)
        return
    path = _writable(path, replace)
    with aside(path) as temporary:
        temporary.mkdir()
        yield temporary
        _move(temporary, path, replace)


@contextmanager
def resumable_directory(path: Path | str, *, replace: Replace | None = None) -> Iterator[Path]:
    """`<path>.building`, renamed to `path` when the block ends without an error, and kept otherwise.

    It still holds the files of an earlier attempt, so killed work can be resumed. Only one process at a time
    may use it. Raises UserError if `path` exists, if another process is building, or if the disk is full.
    """
    path = _writable(path, replace)
    building = path.with_name(path.name + ".building")
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{building} cannot be written: {error.strerror}") from error
    with locked(building, f"another process is building in {building}"):
        try:
            yield building
            _move(building, path, replace)
        except Exception as error:
            if is_disk_full(error, building):
                raise NotWritten(
                    f"{path} is not finished: the disk is full",
                    hint=f"free some space and repeat the command; {building} keeps what is done",
                ) from error
            raise


@contextmanager
def atomic_file(path: Path | str, mode: str = "w") -> Iterator[IO[Any]]:
    """A temporary file that replaces `path` when the block ends without an error.

    `mode` is "w" (UTF-8, line ends unchanged) or "wb". Raises UserError if the disk is full.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_file writes whole files: mode 'w' or 'wb', not {mode!r}")
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory, expected a file")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with aside(path) as temporary:
        with open(temporary, mode, **text) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path of the same name in a hidden, marked directory next to `path`; it is removed afterwards."""
    new_parents = [parent for parent in path.parents if not parent.exists()]
    folder = path.with_name(f".{path.name}.tmp-{_host()}-{token_hex(4)}")
    temporary = folder / path.name
    own_paths = {str(place) for place in (temporary, folder, *path.parents)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        folder.mkdir()
        with locked(folder):
            (folder / MARK).touch()
            yield temporary
    except Exception as error:
        if is_disk_full(error, path.parent):
            raise NotWritten(
                f"{path} was not written: the disk is full", hint="free some space and try again"
            ) from error
        if isinstance(error, OSError) and str(error.filename) in own_paths:
            raise UserError(f"{path} cannot be written: {error.strerror} ({error.filename})") from error
        raise
    finally:
        _remove_marked(folder)
        if not path.exists():
            with suppress(OSError):  # up to the first that is not empty
                for parent in new_parents:
                    parent.rmdir()


def discard(path: Path) -> None:
    """Remove a file or directory of ours: hidden in one step, then deleted, if need be by a later writer."""
    with aside(path) as hidden:
        os.rename(path, hidden)


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers of this host left in `directory`: a lock of another host may not be seen.

    What has no mark is not ours, whatever its name.
    """
    for mark in directory.glob(f".*.tmp-*/{MARK}"):
        match = _ASIDE.match(mark.parent.name)
        if match is None or match["host"] != _host():
            continue
        with suppress(OSError):  # its writer holds it, or the file system has no locks to tell
            descriptor = os.open(mark.parent, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_marked(mark.parent)
            finally:
                os.close(descriptor)


def target_of(path: object) -> Path:
    """The file or directory that an unfinished one is for; other paths as they are."""
    path = Path(str(path))
    match = _ASIDE.match(path.parent.name)
    return path.parent.with_name(match["name"]) if match else path


def is_disk_full(error: BaseException | None, place: Path | None = None) -> bool:
    """Whether a full disk (or quota) led to `error`, or the disk of the directory `place` is full.

    Libraries wrap the system's error in their own, raise theirs while it is handled, or say nothing of it.
    """
    if isinstance(error, OSError) and error.errno is not None:
        place = None  # the system says what it is
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if os.strerror(errno.ENOSPC) in str(error):
            return True
        error = error.__cause__ or error.__context__
    return place is not None and not _has_room(place)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Link `source` to the new path `target`, or copy it where hard links are not possible; directories file
    by file.

    A change to a linked file changes both.
    """
    source, target = Path(source), Path(target)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=link_or_copy)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copy2(source, target)


@contextmanager
def locked(directory: Path, refusal: str | None = None) -> Iterator[None]:
    """Hold a lock on the directory; the system releases it when the process dies. See `lock`."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        lock(descriptor, refusal)
        yield
    finally:
        os.close(descriptor)


def lock(file: int | IO[Any], refusal: str | None = None) -> None:
    """Lock an open file until it is closed; a file system without locks gives none.

    Where another process holds the lock, raises UserError with the text `refusal`; without one it waits.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise UserError(refusal) from error
    except OSError:
        pass


def _writable(path: Path | str, replace: Replace | None) -> Path:
    """`path`, or the target of a link. Raises UserError if no directory may be written there."""
    path = Path(path)
    if path.is_symlink() or path.name == "..":
        path = Path(os.path.realpath(path))
    with suppress(OSError):
        if Path.cwd().is_relative_to(os.path.realpath(path)):
            raise UserError(f"{path} is or contains the current directory", hint="name a new directory")
    if _is_taken(path):
        if replace is None:
            raise UserError(f"{path} exists already", hint="choose another name, or remove it first")
        replace(path)
    return path


def _is_taken(path: Path) -> bool:
    """Whether `path` exists and is not an empty directory."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


def _move(directory: Path, path: Path, replace: Replace | None) -> None:
    """Rename a finished directory to `path`, in the place of one that may be replaced."""
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
    if replace and _is_taken(path):
        replace(path)
        discard(path)
    os.rename(directory, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_marked(folder: Path) -> None:
    """The mark goes last: what a kill or a file that is open (on NFS) leaves is for the next writer."""
    contents = [entry for entry in folder.glob("*") if entry.name != MARK]
    for entry in contents:
        _remove(entry)
    if not any(map(os.path.lexists, contents)):
        _remove(folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()


def _has_room(directory: Path) -> bool:
    with suppress(OSError):
        return shutil.disk_usage(directory).free >= _BLOCK
    return True


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "localhost"


# ---- Digests


def digest_file(path: Path | str) -> str:
    """32 hex digits (blake2b-128) of the file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def digest_path(path: Path) -> str:
    """32 hex digits of a file, or of the files directly in a directory: their names and bytes."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return digest_text(*(text for file in files for text in (file.name, digest_file(file))))


def digest_text(*parts: str) -> str:
    """32 hex digits (blake2b-128) of the parts; `("ab", "c")` and `("a", "bc")` differ."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


# ---- JSON


def read_jsonl(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line number from 1, object)` for each line of a JSON-lines file but blank ones, as `lines_of` reads.

    Raises UserError that names file and line if a line is not a JSON object, or contains NaN.
    """
    path = Path(path)
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            yield number, json_object(line, f"{path}:{number}", no_constant)


def json_object(line: bytes, where: str, constant: Callable[[str], object] | None = None) -> dict[str, Any]:
    """The JSON object in `line`; `constant` is called for NaN and its like. Raises UserError."""
    with parsing(f"{where}: not JSON in UTF-8"):
        value = json.loads(line.decode("utf-8-sig"), parse_constant=constant)
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object {{…}}, found {type(value).__name__}")
    return value


def no_constant(name: str) -> object:
    """What `json_object` calls for a constant that JSON does not have. Raises ValueError."""
    raise ValueError(f"{name} is not a JSON number")


def write_json(path: Path | str, obj: object) -> None:
    """Write `obj` as indented JSON with a final newline, atomically."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path) as file:
        file.write(text)


def read_json(path: Path | str, make: Callable[..., T]) -> T:
    """`make(**fields)` for a JSON object with a format number.

    Raises UserError if the file is no such object, has another format, or unexpected fields.
    """
    fields = json_object(Path(path).read_bytes(), str(path))
    check_format(path, fields.pop("format", None))
    with parsing(path):
        return make(**fields)


def check_format(path: Path | str, number: object) -> None:
    """Raise UserError if `number` is not the format that this srl writes."""
    if number != FORMAT or isinstance(number, bool):
        raise UserError(f"{path} has format {number!r}; this srl reads format {FORMAT}")


# ---- Manifests: `manifest.json` says what kind a directory is, and which files are its own


def write_manifest(directory: Path | str, kind: str, payload: Mapping[str, Any]) -> None:
    """Write `manifest.json` into `directory`: `{"format": 1, "kind": kind, …payload}`."""
    write_json(Path(directory) / MANIFEST, {"format": FORMAT, "kind": kind, **payload})


def read_manifest(path: Path | str, kind: str) -> dict[str, Any]:
    """The manifest of the directory `path`. Raises UserError if it is not of this kind and format."""
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
    names: list[str] = []
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if Path(folder, name).is_symlink()]
        names += [Path(folder, name).relative_to(directory).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name != MANIFEST)


def replaceable(kind: str, description: str, besides: Collection[str] = ()) -> Replace:
    """A `Replace` for directories with a manifest of `kind` and no other files than those listed there.

    `description` is the kind in words, such as "an index"; files in `besides` are allowed always.
    """

    def check(path: Path) -> None:
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"{path} is not {description} (it has no {MANIFEST} of srl) and is not replaced",
                hint="choose another directory, or remove it first",
            )
        files = read_manifest(path, kind).get("files", ())
        foreign = next((name for name in files_in(path) if name not in (*files, *besides)), None)
        if foreign is not None:
            raise UserError(
                f"{path} is not replaced: srl did not write {foreign} in it",
                hint="move that file, or choose another directory",
            )

    return check


def checksums(directory: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """The checksums of the files `names` in `directory`; default: all files except its manifest."""
    names = files_in(directory) if names is None else names
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda name: digest_file(directory / name), names), strict=True))


def check_files(directory: Path, expected: Mapping[str, str]) -> None:
    """Read every file in `expected`. Raises DamagedError if one is missing or has another checksum."""

    def check(name: str) -> None:
        path = directory / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing")
        if digest_file(path) != expected[name]:
            raise DamagedError(f"{path} is damaged: its checksum differs from the recorded one")

    with ThreadPoolExecutor() as pool:
        list(pool.map(check, expected))


def check_checkpoint(path: Path, leave_out: str = "") -> None:
    """Verify the checksums of a checkpoint, except files whose names begin with `leave_out`.

    Raises DamagedError. A directory without a manifest, or of another kind, passes.
    """
    if not (path / MANIFEST).is_file():
        return
    try:
        manifest = json_object((path / MANIFEST).read_bytes(), str(path / MANIFEST))
    except UserError as error:
        raise DamagedError(f"{path / MANIFEST} is damaged: it is not JSON") from error
    if manifest.get("kind") == CHECKPOINT:
        sums = read_manifest(path, CHECKPOINT).get("files", {})
        check_files(path, {n: sums[n] for n in sums if not (leave_out and n.startswith(leave_out))})


# ---- Inputs of commands: files, also `.gz` and `.zst`


def check_input(path: Path) -> None:
    """Raise UserError unless `path` is a file; most inputs are read twice, which a pipe cannot be."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if not path.is_file():
        what = "a directory" if path.is_dir() else "a pipe, which can be read only once"
        raise UserError(f"{path} is {what}; expected a file")


def is_compressed(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix in (".gz", ".zst")


@contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of `path`, decompressed if its name ends in `.gz` or `.zst`.

    Raises UserError if there is no file, or if the compressed data is broken.
    """
    check_input(path)
    try:
        with _opened(path) as file:
            yield file
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: broken gzip file ({error})") from error
    except OSError as error:  # pyarrow's, which have no number
        if path.suffix != ".zst" or error.errno is not None:
            raise
        raise UserError(f"{path}: broken zstd file ({error})") from error


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


def beginning(path: Path) -> bytes:
    """The first MiB of the input. Raises UserError."""
    with open_input(path) as file:
        return file.read(_HEAD)


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, or of the files in a tar archive, whatever its name.

    Search-R1's `wiki-18.jsonl.gz` is such an archive. Raises UserError.
    """
    is_archive = beginning(path)[_TAR] == b"ustar"
    with open_input(path) as file:
        yield from _archived(file, path) if is_archive else file


def _archived(file: IO[bytes], path: Path) -> Iterable[bytes]:
    import tarfile

    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                yield from archive.extractfile(member) or ()
    except tarfile.TarError as error:
        raise UserError(f"{path}: broken tar archive ({error})") from error
