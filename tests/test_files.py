"""Files appear whole or not at all, whatever ends the writer; what is not ours stays."""

import errno
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from srl import files
from srl.errors import UserError

DIRECTORIES = [files.atomic_directory, files.resumable_directory]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def fill(
    writer: Callable, target: Path | str, name: str, replace: Callable[[Path], object] | None = None
) -> None:
    """Write a directory that holds one file."""
    with writer(target, replace=replace) as temporary:
        (temporary / name).write_text(name)


def refused(path: Path) -> None:
    raise UserError(f"{path} is theirs")


def test_a_directory_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "index"
    with files.atomic_directory(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not target.exists()
        with files.atomic_directory(temporary) as inner:  # a second one would be left behind by a kill
            assert inner == temporary
    assert (target / "sub" / "a").read_text() == "1"
    assert names(target.parent) == ["index"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, FileNotFoundError])
@pytest.mark.parametrize("writer", [files.atomic_directory, files.atomic_file])
def test_nothing_is_left_after_an_error(tmp_path, writer, error):
    with pytest.raises(error), writer(tmp_path / "new" / "x"):
        raise error
    assert names(tmp_path) == []


@pytest.mark.parametrize("writer", DIRECTORIES)
def test_a_directory_is_replaced_whole_and_only_if_it_may_be(tmp_path, writer):
    target, link = tmp_path / "far" / "index", tmp_path / "link"
    fill(writer, target, "old")
    link.symlink_to(target)
    for path in (target, link):
        for replace in (None, refused):
            with pytest.raises(UserError):
                fill(writer, path, "new", replace)
    assert names(target) == ["old"]
    asked: list[Path] = []
    fill(writer, link, "new", asked.append)
    assert link.is_symlink()
    assert (names(target), set(asked)) == (["new"], {target})
    assert (names(tmp_path), names(target.parent)) == (["far", "link"], ["index"])


@pytest.mark.parametrize("replace", [None, refused])
@pytest.mark.parametrize("writer", DIRECTORIES)
def test_a_directory_that_appears_meanwhile_is_not_overwritten(tmp_path, writer, replace):
    target = tmp_path / "index"

    def write() -> None:
        with writer(target, replace=replace) as temporary:
            (temporary / "new").write_text("2")
            fill(files.atomic_directory, target, "theirs")

    with pytest.raises((UserError, OSError)):
        write()
    assert names(target) == ["theirs"]


@pytest.mark.parametrize("name", [".", "..", "../here", "sub/.."])
@pytest.mark.parametrize("writer", DIRECTORIES)
def test_the_current_directory_is_never_replaced(tmp_path, monkeypatch, writer, name):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError):
        fill(writer, name, "new", lambda path: None)
    assert (names(tmp_path), names(tmp_path / "here")) == (["here"], ["sub"])


def test_a_file_keeps_its_old_content_until_the_new_is_whole(tmp_path):
    target = tmp_path / "a.json"
    target.write_text("old")
    with files.atomic_file(target) as file:
        file.write("new ä\n")
        file.flush()
        assert target.read_text() == "old"
    assert target.read_bytes() == "new ä\n".encode()
    with files.atomic_file(target, "wb") as file:
        file.write(b"\x00")
    assert target.read_bytes() == b"\x00"
    (tmp_path / "x").mkdir()
    for place in (tmp_path / "x", target / "below"):
        with pytest.raises(UserError), files.atomic_file(place):
            pass
    assert names(tmp_path) == ["a.json", "x"]


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "quota"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_from_other_errors(tmp_path, error, monkeypatch):
    with pytest.raises(files.NotWritten), files.atomic_directory(tmp_path / "big"):
        raise error
    wrapped = RuntimeError("a library's own")
    wrapped.__context__ = error
    with pytest.raises(files.NotWritten), files.atomic_directory(tmp_path / "big"):
        raise wrapped
    assert names(tmp_path) == []
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0))  # as of /proc
    with pytest.raises(OSError, match="odd") as other, files.atomic_directory(tmp_path / "big"):
        raise OSError(errno.EIO, "odd")
    assert not files.is_disk_full(other.value)


KILLED = """
import os, signal, sys
from srl.files import atomic_directory
with atomic_directory(sys.argv[1]) as temporary:
    (temporary / "half").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_writer_leaves_no_target_and_the_next_writer_cleans_up(tmp_path):
    target = tmp_path / "index"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".index.tmp-")
    fill(files.atomic_directory, target, "whole")
    assert (names(tmp_path), names(target)) == (["index"], ["whole"])


def test_what_is_not_a_dead_writers_is_left_alone(tmp_path):
    """Writers that live, those of another host, and what only has such a name."""
    with files.aside(tmp_path / "x") as temporary:
        name = temporary.parent.name
    living, dead, unmarked = (tmp_path / f"{name[:-8]}0000000{letter}" for letter in "abc")
    elsewhere = tmp_path / ".x.tmp-elsewhere-0000000d"
    for folder in (living, dead, unmarked, elsewhere):
        folder.mkdir()
        (folder / ("thesis.txt" if folder == unmarked else files.MARK)).touch()
    with files.locked(living), files.atomic_file(tmp_path / "x") as file:
        file.write("1")
    assert names(tmp_path) == sorted([living.name, unmarked.name, elsewhere.name, "x"])
    assert names(unmarked) == ["thesis.txt"]


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b"\xff{}", b"[" * 100_000, b'{"id": NaN}', b'{"id": -Infinity}']
)
def test_a_bad_line_is_named(tmp_path, bad):
    (tmp_path / "q.jsonl").write_bytes(b'{"a": 1}\n' + bad + b"\n")
    with pytest.raises(UserError, match=r"q\.jsonl:2: "):
        list(files.read_jsonl(tmp_path / "q.jsonl"))


def test_a_manifest_round_trips_and_is_of_one_kind(tmp_path):
    files.write_manifest(tmp_path, "index", {"passages": 3})
    assert files.read_manifest(tmp_path, "index") == {"format": 1, "kind": "index", "passages": 3}
    (tmp_path / "empty").mkdir()
    for place, kind in ((tmp_path, "world"), (tmp_path / "absent", "index"), (tmp_path / "empty", "index")):
        with pytest.raises(UserError, match=str(place)):
            files.read_manifest(place, kind)


def test_a_lock_is_held_until_it_is_given_back(tmp_path):
    with files.locked(tmp_path):
        with pytest.raises(UserError), files.locked(tmp_path, "taken"):
            pass
    with files.locked(tmp_path, "taken"):
        pass
