"""Files appear whole or not at all, whatever ends the writer."""

from __future__ import annotations

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from srl import files
from srl.errors import UserError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_temporary_directory_is_written_in_as_it_is(tmp_path):
    """A second one inside would have a name that the next writer does not clean up after a kill."""
    with files.atomic_directory(tmp_path / "made") as outer:
        with files.atomic_directory(outer) as inner:
            assert inner == outer
            (inner / "a").write_text("1")
        (outer / "b").write_text("2")
        assert list(tmp_path.iterdir()) == [outer.parent]
    assert sorted(entry.name for entry in (tmp_path / "made").iterdir()) == ["a", "b"]


def test_directory_appears_only_when_complete(tmp_path):
    target = tmp_path / "deep" / "index"
    with files.atomic_directory(target) as temporary:
        (temporary / "sub").mkdir()
        (temporary / "sub" / "a").write_text("1")
        assert not target.exists()
        assert temporary.parent.parent == target.parent
    assert (target / "sub" / "a").read_text() == "1"
    assert names(target.parent) == ["index"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("writer", [files.atomic_directory, files.atomic_file])
def test_nothing_is_left_after_an_error(tmp_path, writer, error):
    with pytest.raises(error):
        with writer(tmp_path / "x"):
            raise error
    assert names(tmp_path) == []


def test_existing_directory_is_refused_or_replaced_whole(tmp_path):
    target = tmp_path / "index"
    target.mkdir()
    (target / "old").write_text("1")
    with pytest.raises(UserError, match="exists already"):
        with files.atomic_directory(target):
            pass
    with files.atomic_directory(target, replace=lambda path: None) as temporary:
        (temporary / "new").write_text("2")
        assert names(target) == ["old"]
    assert names(target) == ["new"]
    assert names(tmp_path) == ["index"]


def test_empty_directory_is_filled_without_being_asked(tmp_path):
    (tmp_path / "index").mkdir()
    with files.atomic_directory(tmp_path / "index") as temporary:
        (temporary / "new").write_text("2")
    assert names(tmp_path / "index") == ["new"]


@pytest.mark.parametrize("writer", [files.atomic_directory, files.resumable_directory])
def test_a_link_stays_and_what_it_points_at_is_replaced(tmp_path, writer):
    target, link = tmp_path / "far" / "index", tmp_path / "link"
    target.mkdir(parents=True)
    (target / "old").write_text("1")
    link.symlink_to(target)
    with pytest.raises(UserError, match="far/index exists already"):
        with writer(link):
            pass
    asked = []
    with writer(link, replace=asked.append) as temporary:
        (temporary / "new").write_text("2")
        assert target.parent in temporary.parents
    assert link.is_symlink()
    assert names(target) == ["new"]
    assert set(asked) == {target}
    assert (names(tmp_path), names(target.parent)) == (["far", "link"], ["index"])


def test_a_link_to_what_may_not_be_replaced_changes_nothing(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").write_text("1")
    (tmp_path / "link").symlink_to("theirs")
    with pytest.raises(UserError, match="is theirs"):
        with files.atomic_directory(tmp_path / "link", replace=refused):
            pass
    assert (tmp_path / "link").is_symlink()
    assert names(tmp_path / "theirs") == ["file"]


def refused(path):
    raise UserError(f"{path} is theirs")


@pytest.mark.parametrize("writer", [files.atomic_directory, files.resumable_directory])
def test_directory_that_may_not_be_replaced_stays_also_when_it_comes_late(tmp_path, writer):
    target = tmp_path / "index"

    def write():
        with writer(target, replace=refused) as temporary:
            (temporary / "new").write_text("2")
            target.mkdir()
            (target / "theirs").write_text("1")

    for _ in range(2):
        with pytest.raises(UserError, match="is theirs"):
            write()
    assert names(target) == ["theirs"]


@pytest.mark.parametrize("name", [".", "..", "../here", "sub/.."])
@pytest.mark.parametrize("writer", [files.atomic_directory, files.resumable_directory])
def test_current_directory_is_never_replaced(tmp_path, monkeypatch, writer, name):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is or contains the current directory"):
        with writer(name, replace=lambda path: None):
            pass
    assert names(tmp_path) == ["here"]
    assert names(tmp_path / "here") == ["sub"]


def test_directories_are_exchanged_without_the_system_call_too(tmp_path, monkeypatch):
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *args, **kwargs: object())
    target = tmp_path / "index"
    for text in ("old", "new"):
        with files.atomic_directory(target, replace=lambda path: None) as temporary:
            (temporary / text).write_text(text)
    assert names(target) == ["new"]
    assert names(tmp_path) == ["index"]


def test_directory_that_appears_meanwhile_is_not_overwritten(tmp_path):
    target = tmp_path / "index"

    def write():
        with files.atomic_directory(target):
            target.mkdir()
            (target / "theirs").write_text("2")

    with pytest.raises(UserError, match="cannot be written"):
        write()
    assert names(target) == ["theirs"]
    assert names(tmp_path) == ["index"]


def test_file_keeps_its_old_content_until_the_new_is_whole(tmp_path):
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


def test_file_is_not_written_over_a_directory(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        with files.atomic_file(tmp_path / "x"):
            pass
    assert names(tmp_path) == ["x"]


def test_parent_that_is_a_file_is_one_clear_line(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        with files.atomic_directory(tmp_path / "x" / "y"):
            pass


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "quota"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_full_disk_is_one_line_with_the_path(tmp_path, error):
    with pytest.raises(UserError, match=r"big was not written: the disk is full"):
        with files.atomic_directory(tmp_path / "big"):
            raise error
    assert names(tmp_path) == []


def test_other_errors_of_the_block_pass_unchanged(tmp_path):
    with pytest.raises(FileNotFoundError):
        with files.atomic_directory(tmp_path / "x"):
            (tmp_path / "absent").read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_real_enospc_is_recognised():
    with pytest.raises(OSError) as caught, open("/dev/full", "w") as file:
        file.write("x")
    assert files.is_disk_full(caught.value)


KILLED = """
import os, signal, sys
from srl.files import atomic_directory
with atomic_directory(sys.argv[1]) as temporary:
    (temporary / "half").write_text("1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_writer_leaves_no_target_and_the_next_writer_cleans_up(tmp_path):
    target = tmp_path / "index"
    done = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = names(tmp_path)
    assert left.startswith(".index.tmp-")
    with files.atomic_directory(target) as temporary:
        (temporary / "whole").write_text("2")
    assert names(tmp_path) == ["index"]
    assert names(target) == ["whole"]


def test_a_directory_without_locks_can_be_used(tmp_path, monkeypatch):
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("srl.files.fcntl.flock", no_locks)
    for taken in (None, "another process writes there"):
        with files.locked(tmp_path, taken):
            pass


def test_another_writer_that_lives_is_left_alone(tmp_path):
    host = files._host()
    others = [f".x.tmp-{host}-{os.getppid()}-00000000", ".x.tmp-elsewhere-99999999-00000000"]
    for name in (*others, f".y.tmp-{host}-99999999-0000000f"):
        (tmp_path / name).mkdir()
        (tmp_path / name / files.MARK).touch()
    with files.atomic_file(tmp_path / "x") as file:
        file.write("1")
    assert names(tmp_path) == sorted([*others, "x"])


def test_what_has_only_the_name_of_a_leftover_is_not_ours(tmp_path):
    named = tmp_path / f".x.tmp-{files._host()}-99999999-00000000"
    named.mkdir()
    (named / "thesis.txt").write_text("mine")
    for alone in (False, True):
        files.remove_leftovers(tmp_path, alone=alone)
    with files.atomic_file(tmp_path / "x") as file:
        file.write("1")
    files.discard(tmp_path / "x")
    assert names(tmp_path) == [named.name]
    assert names(named) == ["thesis.txt"]


def test_what_could_not_be_removed_is_still_marked(tmp_path, monkeypatch):
    """Such as a directory with a file that is open, on NFS."""
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "open").touch()
    rmtree = files.shutil.rmtree

    def keeping(path, **options):
        for file in path.glob("*"):
            if file.name != "open":
                rmtree(file, **options) if file.is_dir() else file.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", keeping)
        files.discard(tmp_path / "x")
    assert list(tmp_path.glob("*/x/open"))
    files.remove_leftovers(tmp_path, alone=True)
    assert names(tmp_path) == []


def test_digest_is_blake2b_of_the_bytes(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert files.digest_file(tmp_path / "a") == "cf4ab791c62b8d2b2109c90275287816"


def test_digest_of_texts_tells_where_one_ends():
    assert files.digest_text("ab", "c") != files.digest_text("a", "bc")
    assert files.digest_text("ab", "c") == files.digest_text("ab", "c")
    assert len(files.digest_text()) == 32


def test_jsonl_is_read_with_line_numbers_plain_or_gzipped(tmp_path):
    text = '\ufeff{"a": 1}\n\n{"b": "\u2028ä"}'
    (tmp_path / "q.jsonl").write_text(text, encoding="utf-8")
    (tmp_path / "q.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("q.jsonl", "q.jsonl.gz"):
        assert list(files.read_jsonl(tmp_path / name)) == [(1, {"a": 1}), (3, {"b": "\u2028ä"})]


@pytest.mark.parametrize(
    "bad", [b"{", b"[1]", b"\xff{}", b"[" * 100_000, b'{"id": NaN}', b'{"id": -Infinity}']
)
def test_bad_line_is_named(tmp_path, bad):
    (tmp_path / "q.jsonl").write_bytes(b'{"a": 1}\n' + bad + b"\n")
    with pytest.raises(UserError, match=r"q\.jsonl:2: "):
        list(files.read_jsonl(tmp_path / "q.jsonl"))


def test_missing_and_broken_files_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(files.read_jsonl(tmp_path / "absent.jsonl"))
    with pytest.raises(UserError, match="is a directory"):
        list(files.read_jsonl(tmp_path))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"a": 1}\n')[:-6])
    with pytest.raises(UserError, match="broken gzip"):
        list(files.read_jsonl(tmp_path / "cut.jsonl.gz"))
    (tmp_path / "not.jsonl.gz").write_bytes(b'{"a": 1}\n')
    with pytest.raises(UserError, match="broken gzip"):
        list(files.read_jsonl(tmp_path / "not.jsonl.gz"))


def test_manifest_round_trips_and_carries_its_format(tmp_path):
    files.write_manifest(tmp_path, "index", {"passages": 3})
    assert json.loads((tmp_path / "manifest.json").read_text())["format"] == 1
    assert files.read_manifest(tmp_path, "index") == {"format": 1, "kind": "index", "passages": 3}


@pytest.mark.parametrize("number", [None, "1", True, 0, 2])
def test_another_format_is_refused(number, tmp_path):
    with pytest.raises(UserError):
        files.check_format("x", number)
    files.write_manifest(tmp_path, "index", {"format": number})
    with pytest.raises(UserError):
        files.read_manifest(tmp_path, "index")


def test_wrong_kind_and_no_manifest_are_user_errors(tmp_path):
    files.write_manifest(tmp_path, "world", {})
    with pytest.raises(UserError, match="of kind 'index', found 'world'"):
        files.read_manifest(tmp_path, "index")
    with pytest.raises(UserError, match="does not exist"):
        files.read_manifest(tmp_path / "absent", "index")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no manifest\.json"):
        files.read_manifest(tmp_path / "empty", "index")
