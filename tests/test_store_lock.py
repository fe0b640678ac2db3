"""Two processes at one log: one changes it, the other is told by whom; a SIGKILL gives the lock back."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.store_builder import new_log, write_step

import srl.store
from srl.config import Config, save_config
from srl.errors import UserError
from srl.store import lock
from srl.train import run as train
from srl.train.report import Terminal
from srl.train.run_directory import RunRecord
from srl.workspace import Workspace

HOLDER = """
import sys
from pathlib import Path
from srl.store.lock import LogLock
LogLock(Path(sys.argv[1])).acquire()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An interrupted run of two steps."""
    log = new_log(tmp_path / "run")
    for step in (1, 2):
        write_step(log, step)
    log.close("interrupted")
    save_config(tmp_path / "run", Config())
    RunRecord("tiny", "grpo", "").save(tmp_path / "run")
    return tmp_path / "run"


def resume(run: Path) -> None:
    """Resume after step 1, train step 2, and finish."""
    log = new_log(run)
    log.drop_steps_after(1)
    write_step(log, 2, size=3)
    log.finish()


def counts(run: Path) -> list[tuple[int, int]]:
    """How many trajectories each step has."""
    with srl.store.open(run) as log:
        return log.execute("SELECT step, count(*) FROM trajectories GROUP BY 1 ORDER BY 1").fetchall()


def test_a_log_that_is_being_changed_is_left_alone_until_its_process_is_killed(run):
    command = [sys.executable, "-c", HOLDER, str(run / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        with pytest.raises(UserError, match=f"process {child.pid}"):
            new_log(run)
        with pytest.raises(UserError, match=f"process {child.pid}"):
            train.resume(run, workspace=Workspace(run.parent), terminal=Terminal(quiet=True))
        assert counts(run) == [(1, 2), (2, 2)]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which nobody has waited for
        resume(run)
    assert counts(run) == [(1, 2), (2, 3)]


def test_a_file_system_without_locks_has_logs_nevertheless(run, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", no_locks)
    resume(run)
    assert counts(run) == [(1, 2), (2, 3)]
