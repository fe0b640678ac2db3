"""Several processes build what one builds, byte for byte, and leave nothing behind when they fail."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from srl.errors import UserError
from srl.index import keep_passages
from srl.trajectory import Passage
from srl_bm25 import parallel_build
from srl_bm25.options import Options
from srl_bm25.retriever import BM25Retriever

WORDS = ["river", "the", "Paris", "naïve", "東京", "o'brien", "1,000", "\ud800x", "and", "rivers"]


def passages(count: int) -> list[Passage]:
    draw = random.Random(0)
    return [
        Passage(str(row), " ".join(draw.choices(WORDS, k=row % 7)) + f" only{row % 11}")
        for row in range(count)
    ]


def built(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: object) -> dict[str, bytes]:
    monkeypatch.setattr(parallel_build, "MIN_PASSAGES", 10)
    folder.mkdir()
    BM25Retriever(Options(**options)).build(passages(100), folder, lambda done: None)
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_processes_build_the_same_bytes_as_one(tmp_path, monkeypatch):
    one = built(tmp_path / "one", monkeypatch, build_processes=1)
    many = built(tmp_path / "many", monkeypatch, build_processes=3)
    assert len(one) == 10
    assert one == many


def test_progress_adds_up_to_all_passages(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_build, "MIN_PASSAGES", 10)
    counts: list[int] = []
    BM25Retriever(Options(build_processes=2)).build(passages(2500), tmp_path, counts.append)
    assert counts == sorted(counts)
    assert counts[-1] == 2500


def test_a_process_that_fails_fails_the_build(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_build.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="exit code 1"):
        built(tmp_path / "x", monkeypatch, build_processes=2)
    assert not list((tmp_path / "x" / "bm25").iterdir())


@pytest.mark.parametrize(
    ("ends", "error"), [("os.kill(os.getpid(), 9)", UserError), ("sys.exit(errno.ENOSPC)", OSError)]
)
def test_memory_and_disk_that_run_out_in_a_process_are_named(tmp_path, monkeypatch, ends, error):
    def start(*given):
        command = [sys.executable, "-c", f"import errno, os, sys; {ends}"]
        return subprocess.Popen(command, stdout=given[-1])

    monkeypatch.setattr(parallel_build, "_start", start)
    with pytest.raises(error):
        built(tmp_path / "x", monkeypatch, build_processes=2)


def test_the_files_of_a_killed_build_are_not_part_of_the_next(tmp_path, monkeypatch):
    (tmp_path / "one" / "bm25" / "parts-left").mkdir(parents=True)
    (tmp_path / "one" / "bm25" / "parts-left" / "terms.npy").write_bytes(b"old")
    BM25Retriever(Options()).build(passages(10), tmp_path / "one", lambda done: None)
    assert not (tmp_path / "one" / "bm25" / "parts-left").exists()


@pytest.mark.timeout(120)
def test_an_interruption_ends_the_processes(tmp_path, monkeypatch):
    started = []

    def start(*given):
        says = "input()" if started else "print(1, flush=True); input()"  # neither ends by itself
        command = [sys.executable, "-c", says]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=given[-1]))
        return started[-1]

    def interrupted(done):
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel_build, "_start", start)
    store = keep_passages(passages(50), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        parallel_build.read_in_parts(store, Options(), tmp_path, 2, interrupted)
    assert [each.poll() for each in started] == [-9, -9]


@pytest.mark.parametrize(("asked", "size", "used"), [(3, 10**6, 3), (3, 60_000, 2), (0, 100, 1), (64, 10, 1)])
def test_a_process_must_have_enough_to_do(asked, size, used):
    assert parallel_build.processes(Options(build_processes=asked), size) == used
