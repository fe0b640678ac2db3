"""Several processes build what one builds, byte for byte, and leave nothing behind when they fail."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from srl.errors import UserError
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
