"""What a command reads may be a pipe: a process substitution, a fifo, /dev/stdin. It is read once."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest
from tests.mistakes import Shell, lines, shell

from srl.errors import UserError
from srl.inputs import beginning, on_disk, open_input

__all__ = ["shell"]

SRL = str(Path(sys.executable).with_name("srl"))
CORPUS = [{"id": "a", "contents": '"A"\nred fox'}, {"id": "b", "contents": '"B"\nblue dog'}]
QUESTIONS = [
    {"id": "1", "question": "a fox ?", "golden_answers": ["red"], "supporting_ids": ["a"]},
    {"id": "2", "question": "a dog ?", "golden_answers": ["blue"], "supporting_ids": ["b"]},
]


@pytest.fixture
def fifo(tmp_path: Path) -> Callable[[bytes, str], Path]:
    """A pipe with a name, which gives some bytes."""

    def make(content: bytes, name: str = "pipe") -> Path:
        path = tmp_path / name
        os.mkfifo(path)
        Thread(target=path.write_bytes, args=(content,), daemon=True).start()
        return path

    return make


@pytest.fixture
def typed(shell: Shell) -> Callable[[str], tuple[int, str, str]]:
    """Runs a line of bash beside `corpus.jsonl`, `corpus.jsonl.gz` and `q.jsonl`."""
    corpus = lines(shell.folder / "corpus.jsonl", CORPUS)
    (shell.folder / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    lines(shell.folder / "q.jsonl", QUESTIONS)

    def run(line: str) -> tuple[int, str, str]:
        command = ["bash", "-c", line.replace("srl ", f"{SRL} ", 1)]
        nothing = subprocess.DEVNULL
        done = subprocess.run(
            command, cwd=shell.folder, capture_output=True, text=True, stdin=nothing, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    "line",
    [
        "srl -q index build --corpus <(zcat corpus.jsonl.gz) --out out",
        "srl -q index build --corpus /dev/stdin --out out < <(cat corpus.jsonl)",
        "srl -q index build --corpus /dev/stdin --out out < corpus.jsonl",
        "srl -q index build --corpus <(python3 -c 'import json; "
        'print(json.dumps([json.loads(row) for row in open("corpus.jsonl")]))\') --out out',
    ],
)
def test_a_corpus_is_read_from_a_pipe(typed, shell: Shell, line: str) -> None:
    code, _, err = typed(line)
    assert code == 0, err
    code, out, _ = shell.typed("index", "info", "out", "--corpus", shell.folder / "corpus.jsonl")
    assert (code, "passages          2" in out) == (0, True)


def test_questions_are_read_from_a_pipe(typed) -> None:
    assert typed("srl -q index build --corpus corpus.jsonl --out out")[0] == 0
    code, out, err = typed("srl -q index eval out --questions <(cat q.jsonl) --json")
    assert code == 0, err
    assert json.loads(out)["measured"] == 2


def test_sources_are_read_from_pipes_and_the_tokenizer_learns_from_one(typed, shell: Shell) -> None:
    prepared = typed(
        "srl data prepare questions:train=<(cat q.jsonl) --corpus <(zcat corpus.jsonl.gz) --out made"
    )
    assert prepared[0] == 0, prepared[2]
    assert (shell.folder / "made" / "corpus.jsonl").read_text() == (shell.folder / "corpus.jsonl").read_text()
    assert typed("srl data tokenizer --corpus <(cat corpus.jsonl) --vocab-size 300 --out words")[0] == 0
    code, out, _ = typed("srl data show <(cat q.jsonl) -n 1")
    assert (code, "question: a fox ?" in out) == (0, True)


def test_nothing_is_no_directory(typed) -> None:
    code, _, err = typed("srl index build --corpus /dev/null --out out")
    assert (code, err.splitlines()[-1]) == (
        2,
        'srl: /dev/null: expected passages, one {"id", "contents"} per line, found none',
    )


def test_what_is_needed_more_than_once_says_so_in_one_line(typed) -> None:
    line = "srl -q train --set data.train_files=q.jsonl --set data.corpus=<(cat corpus.jsonl)"
    code, out, err = typed(line)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "can be read only once, and is needed more often; write it to a file first" in err


def test_the_beginning_of_a_pipe_is_still_there_when_it_is_read(fifo) -> None:
    content = b"".join(b"%d\n" % number for number in range(400_000))
    path = fifo(content)
    assert beginning(path) == beginning(path) == content[: 1 << 20]
    with open_input(path) as file:
        assert file.read() == content
    for again in (beginning, lambda path: open_input(path).__enter__()):
        with pytest.raises(UserError, match="can be read only once"):
            again(path)


def test_a_pipe_whose_name_ends_in_gz_is_unpacked(fifo) -> None:
    path = fifo(gzip.compress(b"red fox"), "pipe.gz")
    assert beginning(path) == b"red fox"
    with open_input(path) as file:
        assert file.read() == b"red fox"


def test_a_pipe_can_be_copied_to_where_it_is_read_again(fifo) -> None:
    with on_disk(fifo(b"red fox", "pipe.txt")) as path:
        assert (path.name, path.read_bytes(), path.read_bytes()) == ("pipe.txt", b"red fox", b"red fox")
    assert not path.exists()


def test_a_directory_and_nothing_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a directory, not a file"):
        beginning(tmp_path)
    with pytest.raises(UserError, match="no such file"):
        beginning(tmp_path / "none")
