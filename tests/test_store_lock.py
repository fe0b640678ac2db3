"""Two processes at one log: who changes it says so, and a SIGKILL in the middle of a change loses nothing."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.log_change import ACTIONS, GONE
from tests.store_builder import new_log, write_step

import srl.store
from srl.errors import UserError
from srl.store import lock, merge, parts, reader
from srl.store.lock import LogLock
from srl.store.merge import merge_logs
from srl.store.prune import prune
from srl.train import resume as resuming
from srl.train.run import resume
from srl.workspace import Workspace

ROOT = Path(__file__).parent.parent
TRAINED = {(step, "train"): 2 for step in range(1, 7)}
PRUNED = {step: count for step, count in TRAINED.items() if step not in GONE}
RESUMED = TRAINED | {(5, "train"): 3, (6, "train"): 3}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """A log of six steps as the parts of an interrupted run, and finished."""
    found = {}
    for name in ("parts", "finished"):
        found[name] = tmp_path_factory.mktemp("made") / "run"
        log = new_log(found[name])
        for step in range(1, 7):
            write_step(log, step)
        log.finish() if name == "finished" else log.close("interrupted")
    return found


@pytest.fixture
def run(made, tmp_path) -> Path:
    return shutil.copytree(made["parts"], tmp_path / "run")


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


def named(child: subprocess.Popen[str], doing: str) -> str:
    """The pattern of the line that says who changes the log."""
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
    return rf"log is being {doing} by process {child.pid} since {when}; wait for it to end"


def test_a_log_that_is_being_pruned_is_left_alone_until_its_process_is_killed(run):
    with started("prune", run, "srl.store.prune.sweep", "before", "wait") as child:
        assert child.stdout.readline() == "waiting\n"
        for change in (new_log, lambda run: prune(run / "log", GONE)):
            with pytest.raises(UserError, match=named(child, "pruned")):
                change(run)
        merge_logs([run], run.parent / "merged")
        assert counts(run) == counts(run.parent / "merged") == PRUNED
        kill(child)
        prune(run / "log", GONE)
        new_log(run).finish()
    assert counts(run) == PRUNED
    assert {path.name for path in (run / "log").iterdir()} == {"manifest.json", "log.duckdb"}


def test_of_two_processes_that_resume_one_log_at_once_one_is_refused(run):
    """The first has not yet said in the manifest that it writes."""
    with started("resume", run, "srl.store.run_info.check_not_written", "before", "wait") as child:
        assert child.stdout.readline() == "waiting\n"
        for change in (new_log, lambda run: prune(run / "log", GONE)):
            with pytest.raises(UserError, match=named(child, "written")):
                change(run)
        kill(child)
        ACTIONS["resume"](run)
    assert counts(run) == RESUMED


def test_a_log_that_is_being_written_is_not_merged(run):
    with started("finish", run, "srl.store.writer.LogWriter.finish", "before", "wait") as child:
        assert child.stdout.readline() == "waiting\n"
        with pytest.raises(UserError, match=named(child, "written")):
            merge_logs([run], run.parent / "merged")
        kill(child)
        merge_logs([run], run.parent / "merged")
    assert counts(run.parent / "merged") == TRAINED


def test_a_child_that_outlives_the_killed_writer_does_not_hold_its_lock(run):
    with started("fork", run) as child:
        assert {child.stdout.readline(), child.stdout.readline()} == {"waiting\n", "refused\n"}
        kill(child)
        new_log(run).finish()
    assert counts(run) == TRAINED


def test_a_resumed_run_waits_for_the_process_that_a_killed_launcher_left_behind(run, monkeypatch):
    said = []

    def resumed(note):
        resume(run, workspace=Workspace(run.parent), terminal=SimpleNamespace(note=note))

    def end(text):
        said.append(text)
        launcher.stdin.close()

    with started("launch", run) as launcher:
        pid = int(launcher.stdout.readline())
        refused = rf"is being written by process {pid} since"
        with pytest.raises(UserError, match=refused):
            resumed(said.append)
        assert said == [], "a run that is alive is not waited for"
        kill(launcher)
        with monkeypatch.context() as patched:
            patched.setattr(resuming, "LEFT_BEHIND_S", 0.0)
            with pytest.raises(UserError, match=refused):
                resumed(said.append)
        with pytest.raises(UserError, match=r"it has no run\.json"):  # which is read next
            resumed(end)
        new_log(run).finish()
    assert said == [f"waiting for process {pid} of the stopped run to end"] * 2
    assert counts(run) == TRAINED


KILLS = [
    ("prune", "parts", "srl.store.prune.sweep", "before"),
    ("prune", "finished", "srl.store.finished.create_views", "after"),
    ("merge", "finished", "srl.store.merge.write_watches", "before"),
    ("finish", "parts", "srl.store.writer.LogWriter._clear_parts", "before"),
    ("resume", "finished", "srl.store.writer.reopen", "after"),
    pytest.param("prune", "parts", "srl.store.parts.with_current_columns", "after", marks=pytest.mark.slow),
    pytest.param("prune", "finished", "os.replace", "after", marks=pytest.mark.slow),
    pytest.param("merge", "parts", "os.rename", "before", marks=pytest.mark.slow),
    pytest.param("finish", "parts", "srl.store.finished.create_views", "before", marks=pytest.mark.slow),
    pytest.param("resume", "finished", "srl.store.parts._parquet", "after", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("action", "state", "point", "when"), KILLS)
def test_a_change_that_was_killed_leaves_whole_steps_and_is_completed_by_its_repetition(
    made, tmp_path, action, state, point, when
):
    run = shutil.copytree(made[state], tmp_path / "run")
    with started(action, run, point, when, "kill") as child:
        assert child.wait() == -signal.SIGKILL
    assert counts(run) in ((TRAINED, PRUNED) if action == "prune" else (TRAINED,))
    ACTIONS[action](run)
    whole = {"prune": PRUNED, "resume": RESUMED}.get(action, TRAINED)
    assert counts(run.parent / "merged" if action == "merge" else run) == whole
    is_finished = state == "finished" or action in ("finish", "resume")
    left = {"manifest.json", "log.duckdb" if is_finished else "parts"}
    assert {path.name for path in (run / "log").iterdir()} == left
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_readers_and_kills_of_the_benchmark_find_whole_steps():
    command = [sys.executable, "bench/log_readers.py", "--smoke"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"\b0 of \d+ reads failed; 3 kills, 0 broke the log$", done.stdout.strip()), (
        done.stdout + done.stderr
    )
    assert done.returncode == 0


def test_a_source_that_is_pruned_while_it_is_merged_is_said_and_nothing_is_written(run, monkeypatch):
    whole = merge.write_watches

    def meanwhile(*arguments):
        prune(run / "log", GONE)
        return whole(*arguments)

    monkeypatch.setattr(merge, "write_watches", meanwhile)
    with pytest.raises(UserError, match="was resumed, finished or pruned while it was merged"):
        merge_logs([run], run.parent / "merged")
    assert not (run.parent / "merged").exists()


def test_a_reader_whose_parts_are_pruned_reads_again(run):
    tries = []

    def read(log):
        tries.append(1)
        if len(tries) == 1:
            prune(run / "log", GONE)
        return log.execute("SELECT count(*) FROM trajectories").fetchall()

    assert srl.store.reading([run], read) == [(sum(PRUNED.values()),)]
    assert len(tries) == 2


def test_a_reader_that_looks_for_parts_when_they_have_just_become_a_database_sees_all_steps(run, monkeypatch):
    whole = reader.live_parts

    def late(*arguments):
        monkeypatch.setattr(reader, "live_parts", whole)
        new_log(run).finish()
        return whole(*arguments)

    monkeypatch.setattr(reader, "live_parts", late)
    assert counts(run) == TRAINED


def test_a_reader_that_has_listed_a_compacted_part_which_is_replaced_lists_the_parts_again(run, monkeypatch):
    prune(run / "log", {(1, "train")})
    whole = parts.all_parts

    def early(directory):
        monkeypatch.setattr(parts, "all_parts", whole)
        found = whole(directory)
        prune(run / "log", {(2, "train")})
        return found

    monkeypatch.setattr(parts, "all_parts", early)
    assert counts(run) == PRUNED


def test_locks_of_one_process_are_one_and_the_last_release_removes_the_file(tmp_path):
    file = tmp_path / "log" / "lock"
    with LogLock(file.parent, "written"):
        with LogLock(file.parent, "written") as inner:
            inner.acquire()
        assert file.exists()
    assert not file.exists()


def test_a_lock_ends_with_the_object_that_holds_it(tmp_path):
    held = LogLock(tmp_path, "written")
    held.acquire()
    del held
    assert not (tmp_path / "lock").exists()


def test_the_file_of_a_killed_process_locks_nothing(run):
    (run / "log" / "lock").write_text("{")
    prune(run / "log", GONE)
    assert counts(run) == PRUNED
    assert not (run / "log" / "lock").exists()


def test_a_file_system_without_locks_has_logs_nevertheless(run, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    ACTIONS["resume"](run)
    assert counts(run) == RESUMED


def test_a_log_that_could_not_be_begun_leaves_no_directory(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(srl.store.writer.run_info, "begin", full)
    with pytest.raises(OSError, match="No space"):
        new_log(tmp_path / "run")
    assert not (tmp_path / "run" / "log").exists()
