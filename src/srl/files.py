"""Atomic files and directories, digests, and JSON.

Unfinished output is written next to its target, in a hidden directory that names host and process, and that a
file marks as ours. The next writer removes what dead processes left behind, and nothing without the mark.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, TypeVar

from srl.errors import UserError, parsing
from srl.input_files import lines_of
from srl.processes import is_alive
from srl.pydantic_errors import no_constant

T = TypeVar("T")
FORMAT = 1
"""The format number in every file and directory that srl writes."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""numpy's message for a short write."""
_BLOCK = 4096
_ASIDE = re.compile(r"^\.(?P<name>.+)\.tmp-(?P<host>[\w.]+)-(?P<pid>\d+)-[0-9a-f]{8}$")
MARK = ".srl-unfinished"
"""The file that marks a directory whose content may be removed once its process is dead."""
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Replace = Callable[[Path], None]
"""Called with a path before it is replaced; raises UserError if it must not be."""


class NotWritten(UserError):  # noqa: N818 - what happened, as in CheckFailed
    """A file was not written because the disk is full or the file-size limit was reached."""


@contextmanager
def atomic_directory(path: Path | str, *, replace: Replace | None = None) -> Iterator[Path]:
    """A temporary directory that is renamed to `path` when the block ends without an error.

    On any error, Ctrl-C included, it is removed. An existing `path` is replaced in one step if `replace`
    allows it, else refused before anything is written; an empty directory is always replaced. Raises
    UserError, also if the disk is full.

    A temporary directory is given as it is: what it is for is written whole or not at all.
    """
    if target_of(path) != Path(path):
        yield Path(path)
        return
    path = _target(path, replace)
    with aside(path) as temporary:
        temporary.mkdir()
        yield temporary
        _sync_tree(temporary)
        if replace and _is_taken(path):
            replace(path)
            _exchange(temporary, path)
        else:
            os.rename(temporary, path)
        _sync(path.parent)


@contextmanager
def resumable_directory(path: Path | str, *, replace: Replace | None = None) -> Iterator[Path]:
    """`<path>.building`, renamed to `path` when the block ends without an error, and kept otherwise.

    It still holds the files of an earlier attempt, so killed work can be resumed. Only one process at a time
    may use it. Raises UserError if `path` exists, if another process is building, or if the disk is full.
    """
    path = _target(path, replace)
    building = path.with_name(path.name + ".building")
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{building} cannot be written: {error.strerror}") from error
    with locked(building, f"another process is building in {building}; wait for it, or end it"):
        try:
            yield building
            _sync_tree(building)
        except Exception as error:
            if why := why_not_written(error, building):
                raise NotWritten(
                    f"{path} is not finished: {why} and repeat the command; {building} keeps what is done"
                ) from error
            raise
        if replace and _is_taken(path):
            replace(path)
            _exchange(building, path)
            discard(building)
        else:
            os.rename(building, path)
        _sync(path.parent)


def _target(path: Path | str, replace: Replace | None) -> Path:
    """`path`, or the target of a link. Raises UserError if no directory may be written there."""
    path = Path(path)
    if path.is_symlink() or path.name == "..":
        path = Path(os.path.realpath(path))
    with suppress(OSError):
        if Path.cwd().is_relative_to(os.path.realpath(path)):
            raise UserError(
                f"{path}: this is or contains the current directory; give a new directory, such as ./result"
            )
    if _is_taken(path):
        if replace is None:
            raise UserError(f"{path} exists already; choose another name, or remove it first")
        replace(path)
    return path


def _is_taken(path: Path) -> bool:
    """Whether `path` exists and is not an empty directory."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


@contextmanager
def locked(directory: Path, taken: str | None = None) -> Iterator[None]:
    """Hold a lock on the directory, where the file system has locks; the system releases it when the process
    dies.

    Where another process holds it, raises UserError with the text `taken`; without one it waits.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        _lock(descriptor, directory, taken)
        yield
    finally:
        os.close(descriptor)


def lock_open_file(file: IO[Any], taken: str) -> None:
    """Lock `file` as long as it is open, where the file system has locks.

    Where another process holds it, raises UserError with the text `taken`.
    """
    _lock(file.fileno(), file.name, taken)


def _lock(descriptor: int, name: object, taken: str | None) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if taken is None else fcntl.LOCK_NB))
    except BlockingIOError as error:
        raise UserError(taken or "") from error
    except OSError as error:
        import logging

        logging.getLogger(__name__).debug("the file system of %s has no locks: %s", name, error)


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
    made = _missing_parents(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror} ({error.filename})") from error
    folder = path.with_name(f".{path.name}.tmp-{_host()}-{os.getpid()}-{token_hex(4)}")
    temporary = folder / path.name
    try:
        folder.mkdir()
        (folder / MARK).touch()
        yield temporary
    except Exception as error:
        if why := why_not_written(error, temporary):
            raise NotWritten(f"{path} was not written: {why} and try again") from error
        if isinstance(error, OSError) and str(error.filename) in (str(folder), str(temporary)):
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        raise
    finally:
        _remove_marked(folder)
        if not path.exists():
            _remove_empty(made)


def discard(path: Path) -> None:
    """Remove a file or directory of ours: hidden in one step, then deleted, if need be by a later writer."""
    with aside(path) as hidden:
        os.rename(path, hidden)


def remove_leftovers(directory: Path, *, alone: bool = False) -> None:
    """Remove what killed writers left in `directory`: of this host, or where nobody else writes (`alone`) of
    any. What has no mark is not ours, whatever its name."""
    for mark in directory.glob(f".*.tmp-*/{MARK}"):
        match = _ASIDE.match(mark.parent.name)
        if match and (alone or (match["host"] == _host() and not is_alive(int(match["pid"])))):
            _remove_marked(mark.parent)


def _remove_marked(folder: Path) -> None:
    """The mark goes last: what a kill or a file that is open (on NFS) leaves is for the next writer."""
    contents = [entry for entry in folder.glob("*") if entry.name != MARK]
    for entry in contents:
        _remove(entry)
    if not any(map(os.path.lexists, contents)):
        _remove(folder)


def _missing_parents(path: Path) -> list[Path]:
    """The missing parent directories of `path`, the lowest first."""
    return [parent for parent in path.parents if not parent.exists()]


def _remove_empty(directories: Iterable[Path]) -> None:
    """Remove directories in this order, up to the first that is not empty."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def target_of(path: object) -> Path:
    """The file or directory that an unfinished one is for; other paths as they are."""
    path = Path(str(path))
    found = _ASIDE.match(path.parent.name)
    return path.parent.with_name(found["name"]) if found else path


def why_not_written(error: BaseException, place: Path | None = None) -> str | None:
    """The limit of the machine that ended a write at `place`, and what to do; None for other errors."""
    if _is_too_large(error, place):
        return "a file exceeds the file-size limit; raise it (ulimit -f)"
    full = any(is_disk_full(each) for each in _and_what_led_to_it(error))
    return "the disk is full; free some space" if full or (place and not _has_room(place.parent)) else None


def _and_what_led_to_it(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those behind it: PyTorch raises its own while the one of the file is handled."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_too_large(error: BaseException, place: Path | None) -> bool:
    """Whether a file reached the size limit; libraries do not always report why a write failed."""
    too_large = os.strerror(errno.EFBIG)
    if any(too_large in str(each) for each in _and_what_led_to_it(error)):
        return True
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if place is None or limit == resource.RLIM_INFINITY:
        return False
    written = [place, *place.rglob("*")]
    return any(file.is_file() and file.stat().st_size >= limit for file in written)


def is_disk_full(error: BaseException | None) -> bool:
    """True for ENOSPC and an exhausted quota, also if a library wrapped them in its own error."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return os.strerror(errno.ENOSPC) in str(error) or bool(_SHORT_WRITE.search(str(error)))


def _has_room(directory: Path) -> bool:
    """Whether another block can be written; libraries do not always report why a write failed."""
    with suppress(OSError):
        return shutil.disk_usage(directory).free >= _BLOCK
    return True


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "localhost"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _exchange(one: Path, other: Path) -> None:
    """Swap two paths, in one step if the system can (Linux's renameat2), else in three."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    between = one.with_name(f"{one.name}-{token_hex(4)}")
    os.rename(other, between)
    os.rename(one, other)
    os.rename(between, one)


def _sync_tree(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path | str, report: Callable[[int], object] | None = None) -> str:
    """32 hex digits (blake2b-128) of the file's bytes; `report` is called with the number of bytes of each
    read."""
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if report:
                report(len(chunk))
    return digest.hexdigest()


def digest_path(path: Path) -> str:
    """32 hex digits of a file, or of the files directly in a directory: their names and bytes."""
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    return digest_text(*(text for file in files for text in (file.name, digest_file(file))))


def digest_text(*parts: str) -> str:
    """32 hex digits (blake2b-128) of the parts; `("ab", "c")` and `("a", "bc")` differ."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read_jsonl(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line number from 1, object)` for each line of a JSON-lines file, also `.gz`; blank lines are skipped.

    The file may be a pipe or a tar archive. Raises UserError that names file and line if a line is not a JSON
    object, or contains NaN.
    """
    path = Path(path)
    for number, line in enumerate(lines_of(path), start=1):
        if line.strip():
            yield number, json_object(line, f"{path}:{number}", no_constant)


def json_object(line: bytes, where: str, constant: Callable[[str], object] | None = None) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"), parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON in UTF-8: {_reason(error)}") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object {{…}}, found {type(value).__name__}")
    return value


def _reason(error: Exception) -> str:
    return f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else str(error)


def write_json(path: Path | str, obj: object) -> None:
    """Write `obj` as indented JSON with a final newline, atomically."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path) as file:
        file.write(text)


def read_json(path: Path | str, make: Callable[..., T]) -> T:
    """`make(**fields)` for a JSON object with a format number.

    Raises UserError if the file is no such object, is newer, or has unexpected fields.
    """
    found = json_object(Path(path).read_bytes(), str(path))
    check_format(path, found.pop("format", None))
    with parsing(path):
        return make(**found)


def check_format(path: Path | str, found: object) -> None:
    """Raise UserError if `found` is newer than this version of srl, or not a format number."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"{path}: expected a format number from 1 to {FORMAT}, found {found!r}")
    if found > FORMAT:
        raise UserError(f"{path} has format {found}, this srl reads up to {FORMAT}: a newer srl wrote it")
