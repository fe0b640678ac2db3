"""Opening what a command reads: a file, `.gz` too, or a pipe such as `<(zcat x.gz)` or /dev/stdin.

A pipe can be read once. Its beginning may be looked at before, as often as one likes.
"""

from __future__ import annotations

import gzip
import io
import shutil
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from srl.errors import UserError

_HEAD = 1 << 20
_TAR = slice(257, 262)
"""Where a tar archive says what it is."""
_begun: dict[str, tuple[bytes, IO[bytes]]] = {}
"""Pipes whose beginning was looked at: that, and what gives it again and then the rest."""
_read: set[tuple[int, int]] = set()
"""Pipes that were opened, by device and inode."""


def check_input(path: Path, *, regular: bool = False) -> None:
    """Raise UserError unless `path` can be read; with `regular` also where it can be read only once."""
    if path.is_dir():
        raise UserError(f"{path} is a directory, not a file")
    if not path.exists():
        hint = "; standard input is /dev/stdin" if str(path) == "-" else ""
        raise UserError(f"{path}: no such file{hint}")
    if regular and not path.is_file():
        raise UserError(f"{path} can be read only once, and is needed more often; write it to a file first")


def input_name(path: Path) -> str:
    """The name of a file; `pipe` for one that has only the shell's number, as `<(…)` has in /dev/fd."""
    return "pipe" if path.parent.name == "fd" and path.name.isdecimal() else path.name


@contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of `path`, unpacked where its name ends in `.gz`.

    Raises UserError where there is no file, on a broken gzip file, and on a pipe that was read before.
    """
    check_input(path)
    with _broken_gzip(path), _begun.pop(str(path), (b"", None))[1] or _open(path) as file:
        yield file


def beginning(path: Path) -> bytes:
    """The first MiB of what `open_input` gives, which gives it still. Raises UserError."""
    if str(path) in _begun:
        return _begun[str(path)][0]
    check_input(path)
    with _broken_gzip(path):
        file = _open(path)
        head = file.read(_HEAD)
        if path.is_file():
            file.close()
        else:
            _begun[str(path)] = head, io.BufferedReader(_Again(head, file))
    return head


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, or of the files in it where it is a tar archive, which its name may not say.

    Search-R1's `wiki-18.jsonl.gz` is one. Raises UserError.
    """
    is_archive = beginning(path)[_TAR] == b"ustar"
    with open_input(path) as file:
        yield from _archived(file, path) if is_archive else file


@contextmanager
def on_disk(path: Path) -> Iterator[Path]:
    """`path`, or for a pipe a copy of what it gives, so that it can be read more than once.

    A UserError of the block that names the copy names `path` instead.
    """
    check_input(path)
    if path.is_file():
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory(prefix="srl-input-") as folder:
        copy = Path(folder, input_name(path))
        with open(path, "rb") as source, open(copy, "wb") as target:
            shutil.copyfileobj(source, target)
        try:
            yield copy
        except UserError as error:
            raise UserError(str(error).replace(str(copy), str(path))) from error


def _open(path: Path) -> IO[bytes]:
    state = path.stat()
    if stat.S_ISFIFO(state.st_mode):
        if (state.st_dev, state.st_ino) in _read:
            check_input(path, regular=True)
        _read.add((state.st_dev, state.st_ino))
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


@contextmanager
def _broken_gzip(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: broken gzip file ({error})") from error


class _Again(io.RawIOBase):
    """The bytes `head`, then those that are left in `rest`."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = memoryview(head), rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        chunk = self._head[: len(buffer)] if self._head else self._rest.read(len(buffer))
        buffer[: len(chunk)] = chunk
        self._head = self._head[len(chunk) :]
        return len(chunk)

    def close(self) -> None:
        self._rest.close()
        super().close()


def _archived(file: IO[bytes], path: Path) -> Iterator[bytes]:
    import tarfile

    try:
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                yield from archive.extractfile(member) or ()
    except tarfile.TarError as error:
        raise UserError(f"{path}: broken tar archive ({error})") from error
