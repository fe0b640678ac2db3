"""An index is read whole once: after it was copied or changed, and not again while its files stay."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from tests.cli_mistakes import Shell, shell

from srl.errors import CheckFailed, UserError
from srl.index import build_index, check_index, is_verified, open_index, verification, verify, verify_once
from srl.trajectory import Passage

__all__ = ["shell"]

FILES = ("bm25/indices.npy", "bm25/data.npy", "passages/text.bin", "bm25/indptr.npy")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index whose files have a middle that no cheap check reads."""
    words = (f"word{row} thing{row % 97} part{row % 13} " for row in range(20_000))
    passages = (Passage(f"p{row}", f'"T{row}"\n{text * 3}') for row, text in enumerate(words))
    out = tmp_path_factory.mktemp("large") / "index"
    build_index(passages, out)
    return out


@pytest.fixture
def index(large: Path, tmp_path: Path) -> Path:
    """A copy of it, with its times, as cp -a makes one."""
    shutil.copytree(large, tmp_path / "index")
    return tmp_path / "index"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The indexes that are read whole, one after the other."""
    found: list[Path] = []
    real = verification.check_files

    def counting(directory: Path, *arguments: object) -> None:
        found.append(directory)
        real(directory, *arguments)

    monkeypatch.setattr(verification, "check_files", counting)
    return found


def spoil(file: Path, byte: bytes = b"\x7f") -> None:
    """Other bytes in the middle half; size, ends and time of the last write stay."""
    state, content = file.stat(), bytearray(file.read_bytes())
    quarter = len(content) // 4
    content[quarter : 3 * quarter] = byte * (2 * quarter)
    with open(file, "r+b") as opened:
        opened.write(content)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("byte", [b"\xff", b"\x7f"])
def test_no_middle_of_a_file_is_overwritten_unnoticed(
    shell: Shell, index: Path, name: str, byte: bytes
) -> None:
    open_index(index)
    spoil(index / name, byte)
    for command in (("index", "info", index, "--verify"), ("index", "search", index, "word7")):
        said = shell.refused("-q", *command)
        assert f"{name} is damaged: its checksum differs from the recorded one; copy or build" in said
    code, out, _ = shell.typed("index", "info", index)
    assert (code, "verified          no, only sizes and file ends" in out) == (0, True)


def test_an_index_that_was_just_built_is_not_read_again(large: Path, reads: list[Path]) -> None:
    assert is_verified(large, check_index(large))
    open_index(large)
    assert reads == []


def test_a_copy_is_read_whole_at_its_first_use_and_not_at_its_second(index: Path, reads: list[Path]) -> None:
    assert not is_verified(index, check_index(index))
    open_index(index)
    open_index(index)
    assert reads == [index]


def test_a_directory_that_was_moved_is_not_read_again(index: Path, reads: list[Path]) -> None:
    open_index(index)
    moved = index.rename(index.with_name("moved"))
    open_index(moved)
    assert reads == [index]


def test_a_damaged_copy_stays_unverified(index: Path) -> None:
    spoil(index / "bm25" / "data.npy")
    for _ in range(2):
        with pytest.raises(UserError, match=r"data\.npy is damaged"):
            open_index(index)


def test_an_index_that_cannot_be_written_is_read_once_and_the_cache_remembers(
    index: Path, reads: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, content: object) -> None:
        raise UserError(f"{path} cannot be written: Read-only file system")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(verification, "write_json", refused)
    open_index(index)
    open_index(index)
    assert reads == [index]
    again = index.with_name("again")
    shutil.copytree(index, again)
    open_index(again)
    assert reads == [index, again]


def test_where_nothing_can_be_written_it_is_said_and_searched(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path, content: object) -> None:
        raise UserError(f"{path} cannot be written: Read-only file system")

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(verification, "write_json", refused)
    assert len(open_index(index)) == 20_000
    assert "is verified at every opening" in caplog.text


def test_of_two_that_begin_at_once_one_reads(index: Path, reads: list[Path], monkeypatch) -> None:
    """The second waits for the lock, and finds the record of the first."""
    manifest, real = check_index(index), verification._one_at_a_time

    def late(directory: Path):
        monkeypatch.setattr(verification, "_one_at_a_time", real)
        verify_once(index, manifest)
        return real(directory)

    monkeypatch.setattr(verification, "_one_at_a_time", late)
    verify_once(index, manifest)
    assert reads == [index]


def test_a_large_index_says_that_it_is_read(index: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(verification, "_LARGE", 1)
    monkeypatch.setattr(verification, "_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO, logger="srl"):
        open_index(index)
    said = [record.getMessage() for record in caplog.records]
    assert "GB once" in said[0]
    assert said[-1].endswith("GB read")


def older(index: Path) -> None:
    """As a version without checksums built it."""
    manifest = json.loads((index / "manifest.json").read_text())
    del manifest["checksums"]
    (index / "manifest.json").write_text(json.dumps(manifest))
    (index / ".verified.json").unlink()


def test_an_index_without_checksums_opens_and_verify_says_that_it_has_none(index: Path, shell: Shell) -> None:
    older(index)
    assert len(open_index(index)) == 20_000
    with pytest.raises(CheckFailed, match="has no checksums"):
        verify(index, check_index(index))
    code, _, err = shell.typed("index", "info", index, "--verify")
    assert (code, "only the sizes and ends of its files could be checked" in err) == (1, True)


def test_checksums_that_are_not_of_the_files_are_refused(index: Path) -> None:
    manifest = json.loads((index / "manifest.json").read_text())
    del manifest["checksums"]["bm25/data.npy"]
    (index / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="files and checksums do not match"):
        open_index(index)


def test_verify_says_what_was_checked(index: Path, shell: Shell) -> None:
    code, out, _ = shell.typed("index", "info", index, "--verify")
    assert (code, "verified          yes, every byte" in out) == (0, True)
    assert json.loads(shell.typed("index", "info", index, "--json")[1])["verified"] is True


def test_a_server_reads_a_copy_whole_before_it_listens(index: Path, shell: Shell) -> None:
    spoil(index / "passages" / "text.bin")
    for replicas in ("1", "2"):
        said = shell.refused("serve", "retriever", "--index", index, "--port", "0", "--replicas", replicas)
        assert "text.bin is damaged" in said


def test_an_index_with_its_record_may_be_replaced(index: Path) -> None:
    open_index(index)
    build_index([Passage("a", "red fox")], index, overwrite=True)
    assert len(open_index(index)) == 1
