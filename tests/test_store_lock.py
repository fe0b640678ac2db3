"""Two processes at one log: one changes it, the other is told by whom; a SIGKILL gives the lock back."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.log_change import ACTIONS
from tests.store_builder import new_log, write_step

import srl.store
from srl.errors import UserError
from srl.store import lock
from srl.train import resume_checks
from srl.train.run import resume
from srl.workspace import Workspace

ROOT = Path(__file__).parent.parent
TRAINED = {(step, "train"): 2 for step in range(1, 7)}
RESUMED = TRAINED | {(5, "train"): 3, (6, "train"): 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """An interrupted run of six steps."""
    run = tmp_path_factory.mktemp("made") / "run"
    log = new_log(run)
    for step in range(1, 7):
        write_step(log, step)
    log.close("interrupted")
    return run


@pytest.fixture
def run(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "run")


def counts(run: Path) -> dict[tuple[int, str], int]:
    """How many trajectories each step has, after checking that the tables agree."""
    with srl.store.open(run) as log:
        query = "SELECT step, phase, count(DISTINCT {}) FROM {} GROUP BY ALL ORDER BY ALL"
        found = log.execute(query.format("id", "trajectories")).fetchall()
        for table in ("segments", "searches", "rewards"):
            assert log.execute(query.format("trajectory_id", table)).fetchall() == found
        assert log.execute("SELECT count(*) FROM steps").fetchall() == [(6,)]
    return {(step, phase): count for step, phase, count in found}


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that changes a log; it is killed at the end, and only then reaped."""
    command = [sys.executable, "tests/log_change.py", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def kill(child: subprocess.Popen[str]) -> None:
    """Kill a process and leave it as a zombie, which its parent has not waited for."""
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def test_a_log_that_is_being_changed_is_left_alone_until_its_process_is_killed(run):
    with started("resume", run, "srl.store.run_info.check_not_written") as child:
        assert child.stdout.readline() == "waiting\n"
        with pytest.raises(UserError, match=f"process {child.pid}"):
            new_log(run)
        assert counts(run) == TRAINED
        kill(child)
        ACTIONS["resume"](run)
    assert counts(run) == RESUMED


def test_a_resumed_run_waits_for_the_process_that_a_killed_launcher_left_behind(run, monkeypatch):
    said = []

    def resumed(note):
        resume(run, workspace=Workspace(run.parent), terminal=SimpleNamespace(note=note))

    def end(text):
        said.append(text)
        launcher.stdin.close()

    with started("launch", run) as launcher:
        pid = int(launcher.stdout.readline())
        with pytest.raises(UserError, match=f"process {pid}"):
            resumed(said.append)
        assert said == [], "a run that is alive is not waited for"
        kill(launcher)
        with monkeypatch.context() as patched:
            patched.setattr(resume_checks, "LEFT_BEHIND_S", 0.0)
            with pytest.raises(UserError, match=f"process {pid}"):
                resumed(said.append)
        with pytest.raises(UserError, match=r"run\.json"):  # which is read next
            resumed(end)
        new_log(run).finish()
    assert len(said) == 2
    assert counts(run) == TRAINED


def test_a_file_system_without_locks_has_logs_nevertheless(run, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", no_locks)
    ACTIONS["resume"](run)
    assert counts(run) == RESUMED
