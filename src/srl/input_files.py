"""Opens the inputs of commands: files, also `.gz` and `.zst`, and pipes such as `<(zcat x.gz)` or /dev/stdin.

A pipe can be read only once; its beginning can be peeked at before, any number of times.
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
"""Position of the magic number of a tar archive."""
_begun: dict[str, tuple[bytes, IO[bytes]]] = {}
"""Peeked pipes: their beginning, and a file that yields it again and then the rest."""
_read: set[tuple[int, int]] = set()
"""Pipes that were opened, by device and inode."""


def check_input(path: Path, *, regular: bool = False) -> None:
    """Raise UserError unless `path` can be read; with `regular` also if it can be read only once."""
    if path.is_dir():
        raise UserError(f"{path} is a directory, not a file")
    if not path.exists():
        hint = "; standard input is /dev/stdin" if str(path) == "-" else ""
        raise UserError(f"{path}: no such file{hint}")
    if regular and not path.is_file():
        raise UserError(
            f"{path} can be read only once, but is needed several times; write it to a file first"
        )


def is_compressed(path: Path) -> bool:
    """Whether the name says so."""
    return path.suffix in (".gz", ".zst")


def input_name(path: Path) -> str:
    """The name of a file; `pipe` for a numbered one in /dev/fd, as from `<(…)`."""
    return "pipe" if path.parent.name == "fd" and path.name.isdecimal() else path.name


@contextmanager
def open_input(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of `path`, decompressed if its name ends in `.gz` or `.zst`.

    Raises UserError if there is no file, if the compressed data is broken, and for a pipe that was read
    before.
    """
    check_input(path)
    with _broken(path), _begun.pop(str(path), (b"", None))[1] or _open(path) as file:
        yield file


def beginning(path: Path) -> bytes:
    """The first MiB of the input; `open_input` still yields it. Raises UserError."""
    if str(path) in _begun:
        return _begun[str(path)][0]
    check_input(path)
    with _broken(path):
        file = _open(path)
        head = file.read(_HEAD)
        if path.is_file():
            file.close()
        else:
            _begun[str(path)] = head, io.BufferedReader(_Again(head, file))
    return head


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a file, or of the files in a tar archive, whatever its name.

    Search-R1's `wiki-18.jsonl.gz` is such an archive. Raises UserError.
    """
    is_archive = beginning(path)[_TAR] == b"ustar"
    with open_input(path) as file:
        yield from _archived(file, path) if is_archive else file


@contextmanager
def on_disk(path: Path) -> Iterator[Path]:
    """`path`, or a temporary copy of a pipe, which can be read several times.

    A UserError of the block names `path` instead of the copy.
    """
    if not path.is_dir():
        check_input(path)
    if path.is_file() or path.is_dir():
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
    if path.suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else open(path, "rb")


@contextmanager
def _broken(path: Path) -> Iterator[None]:
    try:
        yield
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(f"{path}: broken gzip file ({error})") from error
    except OSError as error:  # pyarrow's, which have no number
        if path.suffix != ".zst" or error.errno is not None:
            raise
        raise UserError(f"{path}: broken zstd file ({error})") from error


class _Again(io.RawIOBase):
    """The bytes `head`, then the remaining bytes of `rest`."""

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
