"""A disk that is full: one line that names what was not written, exit code 2, and nothing half-written."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from tests.cli_mistakes import Shell, lines, place, shell, train

from srl import files
from srl.store import reading
from srl.train.resume import resume_command

__all__ = ["place", "shell"]

COMMANDS = {
    "data prepare": ("data", "prepare", "questions=q.jsonl", "--out", "in/out"),
    "data world": ("data", "world", "--out", "in/out"),
    "index build": ("-q", "index", "build", "--corpus", "c.jsonl", "--out", "in/out"),
    "plugins new": ("plugins", "new", "reward", "my-own", "--out", "in/out"),
}


def full(*arguments: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def inputs(shell: Shell) -> None:
    lines(shell.folder / "q.jsonl", [{"id": "q", "question": "who", "golden_answers": ["me"]}])
    lines(shell.folder / "c.jsonl", [{"id": "a", "contents": '"A"\nred fox'}])


@pytest.mark.parametrize("name", COMMANDS)
def test_what_does_not_fit_is_named_and_not_there(shell: Shell, inputs, monkeypatch, name: str) -> None:
    monkeypatch.setattr(files.os, "fsync", full)
    assert "in/out was not written: the disk is full" in shell.refused(*COMMANDS[name])


@pytest.mark.parametrize("is_room_left", [False, True])
def test_a_disk_that_fills_up_in_training_stops_the_run_which_goes_on_later(
    shell: Shell, place: Path, workspace: Path, monkeypatch, is_room_left: bool
) -> None:
    """PyTorch raises an error of its own while that of the file is handled. What others need the disk for may
    have been freed when it is asked for room."""

    def failing(*arguments: object) -> None:
        message = "[enforce fail at inline_container.cc:659] . unexpected pos 64 vs 0"
        if not is_room_left:
            raise RuntimeError(message)
        try:
            full()
        except OSError:
            raise RuntimeError(message)  # noqa: B904

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", failing)
        patch.setattr(files, "_has_room", lambda folder: is_room_left)
        code, out, err = shell.typed(*train(place, "--steps", "2"))
    assert (code, out, err.count("\n"), shell.hidden()) == (2, "", 1, [])
    assert "step-000001 was not written: the disk is full" in err
    (run,) = (workspace / "runs").iterdir()
    assert f"; resume with `{resume_command(run)}`: from the start" in err
    assert shell.typed("-q", "train", "--resume")[0] == 0
    assert train_steps(workspace) == [1, 2]


def train_steps(workspace: Path) -> list[int]:
    (run,) = (workspace / "runs").iterdir()
    query = "SELECT step FROM steps WHERE phase = 'train' ORDER BY step"
    return [step for (step,) in reading([run], lambda log: log.execute(query).fetchall())]
