"""`srl data` as a user types it: results on stdout, notes on stderr, exit codes, nothing half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from srl.cli import main


@pytest.fixture
def srl(capsys, monkeypatch, tmp_path):
    """Runs `srl` in an empty directory; gives exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SRL_WORKSPACE", str(tmp_path / "work"))

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_a_command_does_not_overwrite_what_it_reads(srl, tmp_path):
    asked = {"id": "q", "question": "what flag", "golden_answers": ["red"]}
    Path("q.jsonl").write_text(json.dumps(asked) + "\n")
    Path("c.jsonl").write_text('{"id": "a", "contents": "\\"A\\"\\nred"}\n')
    assert srl("data", "prepare", "questions:train=q.jsonl", "corpus=c.jsonl", "--out", "own")[0] == 0
    assert srl("index", "build", "--corpus", "c.jsonl", "--out", "index")[0] == 0
    Path("link.parquet").symlink_to("own/train.parquet")
    shown = ("data", "demonstrations", "--from", "facts", "--data", "own/train.parquet", "--index", "index")
    typed = [
        (*shown, "--out", "own/train.parquet"),
        (*shown, "--out", "link.parquet"),
        (*shown, "--out", "index/manifest.json"),
        ("data", "prepare", "questions:train=own/train.parquet", "--out", "own"),
        ("index", "build", "--corpus", "index/passages.jsonl", "--out", "index"),
    ]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    for command in typed:
        code, _, err = srl(*command, "--overwrite")
        assert (code, err.count("\n")) == (2, 1), command
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
