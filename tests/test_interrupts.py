"""A signal or a full disk at any moment: one line and its exit code, nothing lost; a run goes on."""

import errno
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from tests.cli_mistakes import Shell, lines, place, shell, train
from tests.store_builder import log_rows, run_info

from srl import files
from srl.cli.app import LazyGroup
from srl.errors import UserError
from srl.store import LogWriter, reading
from srl.train.make_missing import make_if_missing
from srl.train.resume import resume_command
from srl.train.run_directory import checkpoints

__all__ = ["place", "shell"]

CHILD = """
import os, signal, sys
from importlib import import_module

def interrupt(where, name, number):
    module, _, owner = where.partition("/")
    target = import_module(module)
    target = getattr(target, owner) if owner else target
    inner, calls = getattr(target, name), 0

    def interrupted(*arguments, **named):
        nonlocal calls
        calls += 1
        if calls == int(number):
            os.kill(os.getpid(), signal.SIG{sent})
        return inner(*arguments, **named)

    setattr(target, name, interrupted)

for ignored in {ignored}:
    signal.signal(ignored, signal.SIG_IGN)
for moment in sys.argv[1].split():
    interrupt(*moment.split(":"))
from srl.cli import main
sys.exit(main(sys.argv[2:]))
"""
STEPS = 3


def interrupt(
    moments: str, *arguments: object, sent: str = "INT", ignored: tuple[int, ...] = ()
) -> tuple[int, str]:
    """`srl …` in a process of its own, which gets a signal in the n-th call of each `module/class:name:n`."""
    code = CHILD.replace("{sent}", sent).replace("{ignored}", str(tuple(map(int, ignored))))
    command = [sys.executable, "-c", code, moments, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    return done.returncode, done.stderr


def steps_of(run: Path) -> list[tuple[int, int]]:
    """The training steps in the log, with how many trajectories each has."""
    query = "SELECT step, count(*) FROM trajectories WHERE phase = 'train' GROUP BY step ORDER BY step"
    return reading([run], lambda log: log.execute(query).fetchall())


MOMENTS = {
    "reading questions": "srl.train.questions:read_questions:2",
    "sampling": "srl.rollout.cached_forward:draw:40",
    "the update": "srl.train.rl:update_actor:2",
    "a step's part of the log": "srl.store.writer:write_part:5",
    "a validation": "srl.train.loop:summarise:3",
    "saving the optimiser": "torch:save:3",
    "finishing the log": "srl.store.writer:write_catalogue:2",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_training_that_is_interrupted_loses_nothing_and_goes_on(
    shell: Shell, place: Path, workspace: Path, moment
):
    typed = train(place, "--steps", STEPS)
    ended = interrupt(moment, *typed)
    assert shell.hidden() == []
    runs = list((workspace / "runs").iterdir()) if workspace.is_dir() else []
    assert ended == (130, f"srl: interrupted{going_on(runs[0]) if runs else ''}\n")
    if runs:
        whole = steps_of(runs[0])
        assert whole == [(step, 8) for step in range(1, len(whole) + 1)]
        assert shell.typed("-q", "train", "--resume")[0] == 0
    else:
        assert shell.typed(*typed)[0] == 0
    (run,) = (workspace / "runs").iterdir()
    assert steps_of(run) == [(step, 8) for step in range(1, STEPS + 1)]
    assert sorted(path.name for path in (run / "checkpoints").iterdir())[-1] == f"step-{STEPS:06d}"


def going_on(run: Path) -> str:
    """What the last line says of how to go on with a run."""
    newest = max(checkpoints(run), default=0)
    start = f"from step {newest}" if newest else "from the start, since there is no checkpoint yet"
    return f"; resume with `srl --workspace {run.parent.parent} train --resume --run {run.name}`: {start}"


SECOND = "srl.train.loop:aclose:1"
"""Called while a run unwinds."""


@pytest.mark.slow
def test_a_second_signal_does_not_disturb_what_the_first_one_ends(
    shell: Shell, place: Path, workspace: Path
) -> None:
    typed = train(place, "--steps", STEPS)
    code, err = interrupt(f"{MOMENTS['sampling']} {SECOND}", *typed, sent="TERM")
    (run,) = (workspace / "runs").iterdir()
    stopping = "srl: stopping; one more signal ends it at once\n"
    assert (code, err) == (143, f"{stopping}srl: terminated{going_on(run)}\n")
    assert shell.typed("-q", "train", "--resume")[0] == 0
    (run,) = (workspace / "runs").iterdir()
    assert steps_of(run) == [(step, 8) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGINT, (130, "interrupted")), (signal.SIGTERM, (143, "terminated"))]
)
def test_a_signal_before_the_command_begins_is_named(shell: Shell, monkeypatch, number, ended) -> None:
    """typer makes its own silent exit of one that comes while it reads the options."""
    monkeypatch.setattr(LazyGroup, "make_context", lambda *_, **__: signal.raise_signal(number))
    assert shell.typed("plugins", "check", "bm25") == (ended[0], "", f"srl: {ended[1]}\n")


WRITERS = {
    "data prepare": ("data", "prepare", "questions=q.jsonl", "--out", "in/out"),
    "data world": ("data", "world", "--out", "in/out"),
    "index build": ("-q", "index", "build", "--corpus", "c.jsonl", "--out", "in/out"),
    "plugins new": ("plugins", "new", "reward", "my-own", "--out", "in/out"),
}


@pytest.fixture
def writer(shell: Shell) -> Shell:
    lines(shell.folder / "q.jsonl", [{"id": "q", "question": "who", "golden_answers": ["me"]}])
    lines(shell.folder / "c.jsonl", [{"id": "a", "contents": '"A"\nred fox'}])
    return shell


@pytest.mark.parametrize(
    ("name", "module", "called"),
    [
        ("data prepare", "srl.data.prepare", "write_manifest"),
        ("index build", "srl.index.build", "make_manifest"),
    ],
)
def test_what_was_being_written_is_not_there_after_an_interruption(
    writer: Shell, monkeypatch, name: str, module: str, called: str
) -> None:
    monkeypatch.setattr(import_module(module), called, lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert writer.refused(*WRITERS[name], code=130) == "interrupted"


FOREVER = "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range * b.range % 7 = 3"


@pytest.mark.parametrize("forever", [FOREVER, "SELECT range(30000000)"])  # constants are not folded
def test_a_query_that_takes_forever_is_stopped(shell: Shell, workspace: Path, monkeypatch, forever) -> None:
    with LogWriter(workspace / "runs" / run_info().run_id / "log", run_info()):
        pass
    monkeypatch.setattr("srl.cli.inspect.views.QUERY_S", 0.05)
    shell.refused("inspect", "sql", forever, "--run", "all", code=2)


def test_two_runs_that_begin_at_once_share_what_they_make(tmp_path: Path) -> None:
    made = tmp_path / "index"

    def lose_the_race(path: Path) -> None:
        path.mkdir()
        raise UserError(f"{path} exists already")

    def fail(path: Path) -> None:
        raise UserError("the corpus has no passages")

    assert make_if_missing(made, lose_the_race) == make_if_missing(made, fail) == made
    with pytest.raises(UserError, match="no passages"):
        make_if_missing(tmp_path / "other", fail)


# A disk that is full: one line that names what was not written, exit code 2, and nothing half-written.


def full(*arguments: object, **named: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("name", WRITERS)
def test_what_does_not_fit_is_named_and_not_there(writer: Shell, monkeypatch, name: str) -> None:
    monkeypatch.setattr(files.os, "fsync", full)
    assert "in/out was not written: the disk is full" in writer.refused(*WRITERS[name])


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
    assert log_rows(run, "SELECT step FROM steps WHERE phase = 'train' ORDER BY step") == [(1,), (2,)]
