"""What a command reads may be a pipe (a process substitution, a fifo, /dev/stdin), or compressed."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pyarrow
import pytest
from tests.cli_mistakes import Shell, lines, shell

from srl.data.parquet import read_questions
from srl.data.relevance import read_labelled_questions
from srl.errors import UserError
from srl.files import beginning, on_disk, open_input
from srl.index.manifest import read_index_manifest

__all__ = ["shell"]

SRL = str(Path(sys.executable).with_name("srl"))
CORPUS = [{"id": "a", "contents": '"A"\nred fox'}, {"id": "b", "contents": '"B"\nblue dog'}]
QUESTIONS = [
    {"id": "1", "question": "a fox ?", "golden_answers": ["red"], "supporting_ids": ["a"]},
    {"id": "2", "question": "a dog ?", "golden_answers": ["blue"], "supporting_ids": ["b"]},
]
SQUAD = {
    "title": "A",
    "paragraphs": [
        {"context": "red fox", "qas": [{"id": "1", "question": "a fox ?", "answers": [{"text": "red"}]}]}
    ],
}


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
        command = ["bash", "-c", line.replace("srl ", f"{SRL} -q ", 1)]
        nothing = subprocess.DEVNULL
        done = subprocess.run(
            command, cwd=shell.folder, capture_output=True, text=True, stdin=nothing, check=False
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    "corpus",
    [
        "<(zcat corpus.jsonl.gz)",
        "/dev/stdin < <(cat corpus.jsonl)",
        "/dev/stdin < corpus.jsonl",
        "<(echo '['; head -1 corpus.jsonl; echo ','; tail -1 corpus.jsonl; echo ']')",
    ],
)
def test_a_corpus_is_read_from_a_pipe(typed, shell: Shell, corpus: str) -> None:
    code, _, err = typed(f"srl index build --out out --corpus {corpus}")
    assert code == 0, err
    code, out, _ = shell.typed("index", "info", "out", "--corpus", shell.folder / "corpus.jsonl")
    assert (code, "passages          2" in out) == (0, True)


def test_questions_and_corpora_are_prepared_measured_and_shown_from_pipes(typed, shell: Shell) -> None:
    prepared = typed("srl data prepare questions=<(cat q.jsonl) corpus=<(zcat corpus.jsonl.gz) --out made")
    assert prepared[0] == 0, prepared[2]
    assert (shell.folder / "made" / "corpus.jsonl").read_text() == (shell.folder / "corpus.jsonl").read_text()
    asked = read_questions(shell.folder / "made" / "train.parquet")
    assert [each.id for each in asked] == ["pipe/train/1", "pipe/train/2"], "the number of a pipe is no data"
    assert typed("srl data tokenizer --corpus <(cat corpus.jsonl) --vocab-size 300 --out words")[0] == 0
    assert typed("srl index build --corpus <(cat corpus.jsonl) --out out")[0] == 0
    assert read_index_manifest(shell.folder / "out").corpus == "pipe"
    for questions in ("q.jsonl", "<(cat q.jsonl)", "<(cat made/train.parquet)"):
        code, out, err = typed(f"srl index eval out --questions {questions} --json")
        assert (code, json.loads(out or "{}").get("measured")) == (0, 2), err
        code, out, _ = typed(f"srl data show {questions} -n 1")
        assert (code, "question: a fox ?" in out) == (0, True)


@pytest.mark.parametrize(
    "content",
    [
        b"1\ta fox ?\n2\ta dog ?\n",
        json.dumps({"data": [SQUAD], "version": "1.1"}).encode(),
        json.dumps({"version": "v2.0", "data": [SQUAD]}, indent=1).encode(),
    ],
    ids=["table", "SQuAD", "SQuAD 2"],
)
def test_questions_of_a_published_format_are_known_in_a_pipe(fifo, content: bytes) -> None:
    asked = read_labelled_questions(fifo(content)).questions
    assert (asked[0].id.removeprefix("squad/test/"), asked[0].text) == ("1", "a fox ?")


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("srl data prepare corpus=/dev/null --out made", "/dev/null"),
        ("srl data show <(echo nothing)", "/dev/fd/63:1"),
        ("srl data show -", "/dev/stdin"),
        ("srl index build --corpus /dev/null --out out", "/dev/null"),
        ("srl train --set data.train_files=q.jsonl --set data.corpus=<(cat corpus.jsonl)", "/dev/fd/63"),
    ],
)
def test_an_error_names_what_was_typed(typed, line: str, named: str) -> None:
    code, out, err = typed(line)
    assert (code, out, err.count("\n"), named in err) == (2, "", 1, True)


def test_a_pipe_is_read_again_from_its_beginning(fifo) -> None:
    content = b"".join(b"%d\n" % number for number in range(400_000))
    path = fifo(content)
    for _ in range(2):
        assert beginning(path) == content[: 1 << 20]
        with open_input(path) as file:
            assert file.read() == content
    assert on_disk(path).read_bytes() == content


def test_a_pipe_whose_name_ends_in_gz_is_unpacked(fifo) -> None:
    path = fifo(gzip.compress(b"red fox"), "pipe.gz")
    assert beginning(path) == b"red fox"


@pytest.mark.parametrize("name", ["q.tsv.zst", "q.tsv.gz", "q.csv.zst", "q.jsonl.zst"])
def test_questions_are_read_from_compressed_files_of_each_kind(name, tmp_path):
    texts = {
        "tsv": "1\ta fox ?\n2\ta dog ?\n",
        "csv": "id,question,golden_answers\n1,a fox ?,red\n2,a dog ?,blue\n",
        "jsonl": "".join(json.dumps(row) + "\n" for row in QUESTIONS),
    }
    data = texts[name.split(".")[1]].encode()
    packed = gzip.compress(data) if name.endswith("gz") else pyarrow.Codec("zstd").compress(data).to_pybytes()
    (tmp_path / name).write_bytes(packed)
    asked = read_labelled_questions(tmp_path / name).questions
    assert [(question.id, question.text) for question in asked] == [("1", "a fox ?"), ("2", "a dog ?")]


def test_a_directory_and_nothing_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=str(path)):
            beginning(path)
