"""Kills, compaction, resuming: a reader sees each step once and whole, whatever happened."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.store_builder import episode, new_log, record, run_info, write_step

import srl.store
from srl import files
from srl.errors import UserError
from srl.process import Process, started
from srl.store import LogWriter, parts, writer
from srl.store import run_info as manifests
from srl.store.records import part_tables
from srl.store.schema import PARTS


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs that a kill would not let run."""


def counts(run: Path) -> dict[tuple[int, str], int]:
    """How many trajectories each step has, after checking that the tables agree."""
    with srl.store.open(run) as connection:
        found = connection.execute("SELECT step, phase, trajectories FROM steps ORDER BY ALL").fetchall()
        query = "SELECT step, phase, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL"
        assert connection.execute(query).fetchall() == found
        query = "SELECT step, phase, count(DISTINCT trajectory_id) FROM {} GROUP BY ALL ORDER BY ALL"
        for table in ("segments", "searches", "rewards"):
            assert connection.execute(query.format(table)).fetchall() == found
    return {(step, phase): count for step, phase, count in found}


@pytest.fixture
def quick(monkeypatch):
    """Compaction after four parts."""
    monkeypatch.setattr(writer, "COMPACT_AT", 4)


def test_kill_between_the_files_of_a_step_shows_whole_steps_only(tmp_path, monkeypatch):
    log = new_log(tmp_path)
    write_step(log, 1)
    whole = parts._parquet
    for last in PARTS:

        def dying(directory, table, last=last):
            if table == last:
                raise Killed
            return whole(directory, table)

        with monkeypatch.context() as patch:
            patch.setattr(parts, "_parquet", dying)
            patch.setattr("srl.files._remove", lambda path: None)
            with pytest.raises(Killed):
                write_step(log, 2)
        assert counts(tmp_path) == {(1, "train"): 2}
    write_step(log, 2)
    assert counts(tmp_path) == {(1, "train"): 2, (2, "train"): 2}
    log.finish()
    assert counts(tmp_path) == {(1, "train"): 2, (2, "train"): 2}
    assert {path.name for path in (tmp_path / "log").iterdir()} == {"manifest.json", "log.duckdb", "parts"}


def test_parts_are_compacted_as_they_grow_in_number(tmp_path, quick):
    log = new_log(tmp_path)
    for step in range(1, 11):
        write_step(log, step, size=step)
    live = parts.live_parts(tmp_path / "log" / "parts")
    assert [(part.first, part.last) for part in live] == [(1, 4), (5, 8), (9, 9), (10, 10)]
    assert counts(tmp_path) == {(step, "train"): step for step in range(1, 11)}


def test_compacted_parts_stay_for_those_who_are_reading_them(tmp_path, quick):
    log = new_log(tmp_path)
    for step in (1, 2, 3):
        write_step(log, step)
    with srl.store.open(tmp_path) as connection:
        write_step(log, 4)
        assert connection.execute("SELECT count(*) FROM segments").fetchall() == [(24,)]
    for step in (5, 6, 7, 8):
        write_step(log, step)
    names = {path.name for path in (tmp_path / "log" / "parts").iterdir()}
    assert "step-000001-train-main-000001" not in names
    assert counts(tmp_path) == {(step, "train"): 2 for step in range(1, 9)}


@pytest.mark.parametrize("where", ["write_compacted", "sweep"])
def test_kill_during_compaction_loses_and_doubles_nothing(tmp_path, quick, monkeypatch, where):
    log = new_log(tmp_path)
    for step in (1, 2, 3):
        write_step(log, step)
    target = parts if where == "write_compacted" else writer

    def die(*arguments, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(target, where, die)
        with pytest.raises(Killed):
            write_step(log, 4)
    expected = {(step, "train"): 2 for step in (1, 2, 3, 4)}
    assert counts(tmp_path) == expected
    log = new_log(tmp_path)
    write_step(log, 5)
    assert counts(tmp_path) == expected | {(5, "train"): 2}


def test_kill_while_parts_are_deleted_brings_none_back(tmp_path, quick, monkeypatch):
    log = new_log(tmp_path)
    for step in range(1, 5):
        write_step(log, step)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "rmtree", lambda *a, **k: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            log.drop_steps_after(0)
    assert counts(tmp_path) == {(step, "train"): 2 for step in range(1, 5)}
    new_log(tmp_path).drop_steps_after(0)
    assert counts(tmp_path) == {}
    assert not [path for path in (tmp_path / "log" / "parts").iterdir() if not path.name.startswith(".")]


def test_resumed_run_drops_what_came_after_its_checkpoint(tmp_path, quick):
    log = new_log(tmp_path)
    for step in range(1, 8):
        write_step(log, step)
    log = new_log(tmp_path)
    log.drop_steps_after(3)
    assert counts(tmp_path) == {(step, "train"): 2 for step in (1, 2, 3)}
    write_step(log, 4, size=5)
    assert counts(tmp_path)[4, "train"] == 5


def test_resumed_run_drops_steps_of_all_writers(tmp_path):
    log = new_log(tmp_path)
    worker = LogWriter(tmp_path / "log", run_info(tmp_path.name), worker="w1")
    for step in (1, 2):
        write_step(log, step)
        worker.write(step, "val", [record(episode(9, step=step, phase="val"))], {})
    new_log(tmp_path).drop_steps_after(1)
    assert counts(tmp_path) == {(1, "train"): 2, (1, "val"): 1}


@pytest.mark.parametrize("until", [0, 2, 9])
def test_resumed_after_finish_goes_on_where_it_says(tmp_path, until):
    log = new_log(tmp_path)
    for step in (1, 2, 3):
        write_step(log, step)
    log.finish()
    log = new_log(tmp_path)
    log.drop_steps_after(until)
    kept = {(step, "train"): 2 for step in (1, 2, 3) if step <= until}
    assert counts(tmp_path) == kept
    write_step(log, until + 1, size=3)
    log.finish()
    assert counts(tmp_path) == kept | {(until + 1, "train"): 3}


def test_kill_while_a_finished_log_opens_again_loses_nothing(tmp_path, monkeypatch):
    with new_log(tmp_path) as log:
        write_step(log, 1)
        write_step(log, 2)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "write_compacted", lambda *a, **k: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            new_log(tmp_path).drop_steps_after(1)
    assert counts(tmp_path) == {(1, "train"): 2, (2, "train"): 2}
    new_log(tmp_path).drop_steps_after(1)
    assert counts(tmp_path) == {(1, "train"): 2}


def test_kill_while_a_log_is_finished_doubles_nothing(tmp_path, monkeypatch):
    log = new_log(tmp_path)
    write_step(log, 1)
    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "_clear_parts", lambda self: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            log.finish()
    assert (tmp_path / "log" / "parts").exists()
    assert counts(tmp_path) == {(1, "train"): 2}
    log = new_log(tmp_path)
    write_step(log, 2)
    assert counts(tmp_path) == {(1, "train"): 2, (2, "train"): 2}


def test_step_that_a_resumed_run_writes_again_replaces_the_old_one(tmp_path, quick):
    for size, finish in ((2, False), (3, True), (4, False)):
        log = new_log(tmp_path)
        for step in range(1, 6):
            write_step(log, step, "val", size=size)
        assert counts(tmp_path) == {(step, "val"): size for step in range(1, 6)}
        if finish:
            log.finish()


def test_two_writes_of_a_step_by_one_writer_add_up(tmp_path):
    log = new_log(tmp_path)
    for number in (1, 2):
        log.write(1, "val", [record(episode(number, phase="val"))], {})
    assert counts(tmp_path) == {(1, "val"): 2}


def test_full_disk_at_the_end_keeps_the_parts(tmp_path, monkeypatch):
    log = new_log(tmp_path)
    write_step(log, 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("srl.store.database.create_tables", full)
    with pytest.raises(UserError, match=r"log\.duckdb was not written: the disk is full"):
        log.finish()
    assert counts(tmp_path) == {(1, "train"): 2}
    assert {path.name for path in (tmp_path / "log").iterdir()} == {"manifest.json", "log.duckdb", "parts"}


def status(run: Path) -> str:
    with srl.store.open(run) as connection:
        ((found,),) = connection.execute("SELECT status FROM runs").fetchall()
    return found


def test_context_says_how_the_run_ended(tmp_path):
    for error, ended in ((None, "finished"), (RuntimeError, "failed"), (KeyboardInterrupt, "interrupted")):
        run = tmp_path / ended
        try:
            with new_log(run) as log:
                write_step(log, 1)
                assert status(run) == "running"
                if error:
                    raise error
        except (RuntimeError, KeyboardInterrupt):
            pass
        assert status(run) == ended
        assert counts(run) == {(1, "train"): 2}


def test_run_whose_writer_is_gone_is_interrupted(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    new_log(tmp_path)
    path = tmp_path / "log" / "manifest.json"
    manifest = json.loads(path.read_text())
    for change, expected in (
        ({"pid": child.pid}, "interrupted"),
        ({"since": "0"}, "interrupted"),
        ({"host": "elsewhere"}, "unknown"),
        ({}, "running"),
    ):
        path.write_text(json.dumps(manifest | {"writer": manifest["writer"] | change}))
        assert status(tmp_path) == expected


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_writer_that_was_killed_and_not_reaped_is_gone():
    """As in a container whose first process waits for no orphans."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        writer = replace(Process.here(), pid=child.pid, since=started(child.pid))
        assert writer.alive
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert writer.alive is False


def test_log_that_another_process_writes_is_not_taken_over(tmp_path, monkeypatch):
    new_log(tmp_path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(UserError, match="is being written by process"):
        new_log(tmp_path)


def test_run_taken_up_again_keeps_its_start(tmp_path):
    new_log(tmp_path).finish()
    LogWriter(tmp_path / "log", srl.store.RunInfo(tmp_path.name, started="2030-01-01T00:00:00+00:00"))
    with srl.store.open(tmp_path) as connection:
        ((started,),) = connection.execute("SELECT started FROM runs").fetchall()
    assert started.year == 2025


@pytest.fixture
def at(monkeypatch) -> Callable[[float], None]:
    """The manifest's clock stands so many seconds after the test began."""
    began = datetime.now(UTC)

    def stand(seconds: float) -> None:
        moment = began + timedelta(seconds=seconds)
        monkeypatch.setattr(manifests, "now", lambda: moment.isoformat(timespec="seconds"))

    return stand


def worked(run: Path) -> float:
    with srl.store.open(run) as connection:
        ((seconds,),) = connection.execute("SELECT seconds FROM runs").fetchall()
    return seconds


def test_time_that_a_run_lay_still_is_not_time_that_it_worked(tmp_path, at):
    at(0)
    log = new_log(tmp_path)
    at(10)
    log.close("interrupted")
    at(1800)
    log = new_log(tmp_path)
    at(1805)
    log.finish()
    assert worked(tmp_path) == 15


def test_a_killed_run_worked_until_its_last_step(tmp_path, at):
    at(-100)
    write_step(new_log(tmp_path), 1)
    at(3600)
    log = new_log(tmp_path)
    log.drop_steps_after(0)
    at(3605)
    log.finish()
    assert 100 <= worked(tmp_path) < 3600


def test_an_older_log_worked_from_its_start_to_its_end(tmp_path):
    new_log(tmp_path).finish()
    manifest = json.loads((tmp_path / "log" / "manifest.json").read_text())
    manifest["run"]["started"], manifest["ended"] = "2025-01-01T00:00:00+00:00", "2025-01-01T00:00:30+00:00"
    del manifest["resumed"], manifest["earlier_s"]
    (tmp_path / "log" / "manifest.json").write_text(json.dumps(manifest))
    assert worked(tmp_path) == 30


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.just("write"), st.integers(0, 5), st.sampled_from(["train", "val"]))
        | st.tuples(st.sampled_from(["drop_steps_after"]), st.integers(0, 5))
        | st.tuples(st.sampled_from(["restart", "finish"])),
        max_size=14,
    )
)
def test_any_history_shows_what_a_dictionary_would(tmp_path_factory, history):
    """The log against the simplest model of it: a dictionary, and the keys that this writer wrote."""
    run = tmp_path_factory.mktemp("run")
    before, writer.COMPACT_AT = writer.COMPACT_AT, 3
    try:
        log, model, mine = new_log(run), {}, set()
        for name, *arguments in history:
            if name == "write":
                key = (arguments[0], arguments[1])
                number = 10 + sum(model.get(key, [])) if key in mine else 1
                trajectory = episode(number, step=key[0], phase=key[1])
                log.write(*key, [record(trajectory)], {})
                model[key] = [*(model.get(key, []) if key in mine else []), number]
                mine.add(key)
            elif name == "drop_steps_after":
                log.drop_steps_after(arguments[0])
                model = {key: value for key, value in model.items() if key[0] <= arguments[0]}
            else:
                if name == "finish":
                    log.finish()
                log, mine = new_log(run), set()
        assert counts(run) == {key: len(value) for key, value in model.items()}
    finally:
        writer.COMPACT_AT = before


@pytest.mark.slow
def test_killed_process_leaves_whole_steps(tmp_path):
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from store_builder import new_log, write_step
        import srl.store.writer
        srl.store.writer.COMPACT_AT = 3
        log = new_log(Path(sys.argv[1]))
        step = 0
        while True:
            step += 1
            write_step(log, step, size=4)
            print(step, flush=True)
    """
    for attempt in range(3):
        run = tmp_path / str(attempt)
        command = [sys.executable, "-c", textwrap.dedent(code), str(run), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout:
                if int(line) == 5 + attempt:
                    os.kill(child.pid, signal.SIGKILL)
                    break
            child.stdout.read()
        found = counts(run)
        assert list(found) == [(step, "train") for step in range(1, len(found) + 1)]
        assert len(found) >= 5 + attempt
        assert set(found.values()) == {4}
        assert status(run) == "interrupted"


def test_part_says_in_its_name_what_it_holds(tmp_path):
    tables = part_tables("r", 12, "val", [], {})
    parts.write_part(tmp_path, 12, "val", "w1", 7, tables)
    (part,) = parts.all_parts(tmp_path)
    assert (part.first, part.last, part.phase, part.worker, part.number) == (12, 12, "val", "w1", 7)
    assert part.steps() == {(12, "val")}
    (tmp_path / "notes").mkdir()
    (tmp_path / ".step-000013-val-w1-000008.tmp-host-1-00000000").mkdir()
    assert parts.all_parts(tmp_path) == [part]
