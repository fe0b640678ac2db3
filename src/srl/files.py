"""Files that appear whole or not at all, digests, and JSON lines.

Something half-written lives beside its target under a hidden name that holds host and process,
so it is never mistaken for the real thing; what a dead process left is removed by the next writer.
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
from glob import escape
from hashlib import blake2b
from pathlib import Path
from secrets import token_hex
from typing import IO, Any, TypeVar

from srl.errors import UserError
from srl.inputs import lines_of
from srl.validation import no_constant

T = TypeVar("T")
FORMAT = 1
"""The format number that every file and directory of ours carries."""

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""What numpy says of a write that did not fit."""
_BLOCK = 4096
_ASIDE = re.compile(r"^\.(?P<name>.+)\.tmp-(?P<host>[\w.]+)-(?P<pid>\d+)-[0-9a-f]{8}$")
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2

Replace = Callable[[Path], None]
"""Told what is at a path before it is replaced; raises UserError where it must stay."""


class NotWritten(UserError):  # noqa: N818 - what happened, as in CheckFailed
    """A full disk, or a limit of file sizes, kept a file from being written."""


@contextmanager
def atomic_directory(path: Path | str, *, replace: Replace | None = None) -> Iterator[Path]:
    """A temporary directory beside `path` that becomes `path` when the block ends without an error.

    On any error, ctrl-C included, it is removed. What is at `path` is replaced in one step if `replace`
    allows it, else refused before anything is written; an empty directory is always replaced. Raises
    UserError, also on a full disk.
    """
    path = _target(path, replace)
    with _aside(path) as temporary:
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
    """`<path>.building`, which becomes `path` when the block ends without an error, and stays if not.

    What an earlier attempt left there is there again, so work goes on where it was killed. One process
    at a time may be in it. Raises UserError where `path` is taken, another process builds, the disk is full.
    """
    path = _target(path, replace)
    building = path.with_name(path.name + ".building")
    try:
        building.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{building} cannot be written: {error.strerror}") from error
    with _alone_in(building):
        try:
            yield building
            _sync_tree(building)
        except Exception as error:
            if why := why_not_written(error, building):
                raise NotWritten(
                    f"{path} is not finished: {why} and type the same again, what is done stays in {building}"
                ) from error
            raise
        if replace and _is_taken(path):
            replace(path)
            _exchange(building, path)
            _remove(building)
        else:
            os.rename(building, path)
        _sync(path.parent)


def _target(path: Path | str, replace: Replace | None) -> Path:
    """`path`, or what it links to, if a directory may be written there. Raises UserError where it may not."""
    path = Path(path)
    if path.is_symlink() or path.name == "..":
        path = Path(os.path.realpath(path))
    with suppress(OSError):
        if Path.cwd().is_relative_to(path.resolve(strict=True)):
            raise UserError(
                f"{path}: this is the current directory, or holds it; give a new directory, such as ./result"
            )
    if _is_taken(path):
        if replace is None:
            raise UserError(f"{path} exists already; choose another name, or remove it first")
        replace(path)
    return path


def _is_taken(path: Path) -> bool:
    """Whether something is at `path` other than an empty directory."""
    return path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir())))


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which the system gives up when the process dies."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"another process is building in {directory}; wait for it, or end it") from error
    finally:
        os.close(descriptor)


def link_or_copy(source: Path | str, target: Path | str) -> None:
    """Make `target` (a new path) hold what `source` holds: a hard link where the file system allows one,
    else a copy; a directory file by file. Whoever changes a linked file changes both."""
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
    """A file opened beside `path` that replaces it when the block ends without an error.

    `mode` is "w" (UTF-8, line ends as written) or "wb". Raises UserError on a full disk.
    """
    if mode not in ("w", "wb"):
        raise ValueError(f"atomic_file writes whole files: mode 'w' or 'wb', not {mode!r}")
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path} is a directory; a file was to be written there")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
    with _aside(path) as temporary:
        with open(temporary, mode, **text) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync(path.parent)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`, for this process; whatever lies there afterwards is removed."""
    made = _missing_parents(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror} ({error.filename})") from error
    temporary = path.with_name(f".{path.name}.tmp-{_host()}-{os.getpid()}-{token_hex(4)}")
    try:
        yield temporary
    except Exception as error:
        if why := why_not_written(error, temporary):
            raise NotWritten(f"{path} was not written: {why} and try again") from error
        if isinstance(error, OSError) and str(error.filename) == str(temporary):
            raise UserError(f"{path} cannot be written: {error.strerror}") from error
        raise
    finally:
        _remove(temporary)
        if not path.exists():
            _remove_empty(made)


def _missing_parents(path: Path) -> list[Path]:
    """The directories above `path` that are not there yet, the lowest first."""
    return [parent for parent in path.parents if not parent.exists()]


def _remove_empty(directories: Iterable[Path]) -> None:
    """Remove directories in which nothing is, as far as the first in which something is."""
    with suppress(OSError):
        for directory in directories:
            directory.rmdir()


def why_not_written(error: BaseException, place: Path | None = None) -> str | None:
    """Which limit of the machine ended a write at `place`, and what to do; None where it was none."""
    if _is_too_large(error, place):
        return "a file would be larger than the limit here; raise it (ulimit -f)"
    full = is_disk_full(error) or is_disk_full(error.__cause__)
    return "the disk is full; free some space" if full or (place and not _has_room(place.parent)) else None


def _is_too_large(error: BaseException, place: Path | None) -> bool:
    """Whether a file reached the limit of sizes; libraries do not always say why a write failed."""
    too_large = os.strerror(errno.EFBIG)
    if any(too_large in str(each) for each in (error, error.__cause__)):
        return True
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if place is None or limit == resource.RLIM_INFINITY:
        return False
    written = [place, *place.rglob("*")]
    return any(file.is_file() and file.stat().st_size >= limit for file in written)


def is_disk_full(error: BaseException | None) -> bool:
    """True for ENOSPC and a used-up quota, also when a library wrapped them in an error of its own."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return os.strerror(errno.ENOSPC) in str(error) or bool(_SHORT_WRITE.search(str(error)))


def _has_room(directory: Path) -> bool:
    """Whether a block can still be written; libraries do not always say why a write failed."""
    with suppress(OSError):
        return shutil.disk_usage(directory).free >= _BLOCK
    return True


def _host() -> str:
    return re.sub(r"[^\w.]", "_", socket.gethostname()) or "localhost"


def _remove_stale(path: Path) -> None:
    """Remove what writers of `path` on this host left behind when they were killed."""
    for entry in path.parent.glob(f".{escape(path.name)}.tmp-*"):
        match = _ASIDE.match(entry.name)
        ours = match and (match["name"], match["host"]) == (path.name, _host())
        if match and ours and not _is_alive(int(match["pid"])):
            _remove(entry)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(FileNotFoundError):
            path.unlink()


def _exchange(one: Path, other: Path) -> None:
    """Swap two paths, in one step where the system can (Linux's renameat2), else in three."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    if rename and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    between = one.with_name(one.name[:-8] + token_hex(4))
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
    """32 hex digits (blake2b-128) of the file's bytes; `report` hears how many more were read."""
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
            if report:
                report(len(chunk))
    return digest.hexdigest()


def digest_text(*parts: str) -> str:
    """32 hex digits (blake2b-128) of the parts; `("ab", "c")` and `("a", "bc")` differ."""
    digest = blake2b(digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def read_jsonl(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """`(line number from 1, object)` for each line of a JSON-lines file, `.gz` too; blank lines are skipped.

    The file may be a pipe, or lie in a tar archive. Raises UserError naming file and line where a line is not
    a JSON object, or holds a NaN.
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
    """Write `obj` as indented JSON with a final newline; whole or not at all."""
    text = json.dumps(obj, indent=2, ensure_ascii=False) + "\n"
    with atomic_file(path) as file:
        file.write(text)


def read_json(path: Path | str, make: Callable[..., T]) -> T:
    """`make(**fields)` of a JSON object that carries its format number.

    Raises UserError for a file that is no such object, is newer, or has other fields than `make` takes.
    """
    found = json_object(Path(path).read_bytes(), str(path))
    check_format(path, found.pop("format", None))
    try:
        return make(**found)
    except TypeError as error:
        raise UserError(f"{path}: expected what srl writes there, found other fields ({error})") from error


def check_format(path: Path | str, found: object) -> None:
    """Refuse, in one line, a file whose `format` number is newer than this `srl` or is none at all."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UserError(f"{path}: expected a format number from 1 to {FORMAT}, found {found!r}")
    if found > FORMAT:
        raise UserError(
            f"{path} has format {found}, this srl reads up to {FORMAT}; "
            "type `pip install -U srl-search` to upgrade"
        )
