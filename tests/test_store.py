"""The log as it is asked: its tables and its rows; and two processes at one log."""

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from tests.store_builder import BERN, KLEE, episode, log_rows, new_log, question, record, search, write_step

import srl.store
from srl.cli import main
from srl.config import Config, save_config
from srl.errors import UserError
from srl.store import Record, lock
from srl.train import run as train
from srl.train.report import Terminal
from srl.train.run_directory import RunRecord
from srl.trajectory import Score
from srl.workspace import Workspace


@pytest.mark.parametrize("folder", ["it's [a] *", "turns=4", "exp:1"])
def test_a_run_is_found_whatever_its_path_and_in_a_folder_of_runs(tmp_path, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        with new_log(Path(folder) / "runs" / name) as log:
            log.write(1, "val", [], {"val/em": 0.5, "env/finish_ratio": 0.75, "val/em/nq": 0.25})
            write_step(log, 2)
    runs = Path(folder) / "runs"
    for path, count in ((runs / "a", 1), (runs / "a" / "log", 1), (runs, 2), (Path(folder), 2)):
        with srl.store.open(path) as connection:
            assert one(connection, "SELECT count(DISTINCT run_id) FROM trajectories WHERE turns = 2") == count
            steps = connection.execute("SELECT DISTINCT em, finish_ratio, score FROM steps WHERE step = 1")
            assert steps.fetchall() == [(0.5, 0.75, None)]


def one(connection: duckdb.DuckDBPyConnection, query: str):
    ((value,),) = connection.execute(query).fetchall()
    return value


def test_every_table_has_the_columns_and_types_that_are_described(tmp_path):
    write_step(new_log(tmp_path), 1)
    with srl.store.open(tmp_path) as connection:
        for table in srl.store.TABLES:
            found = [row[:2] for row in connection.execute(f"DESCRIBE {table.name}").fetchall()]
            assert found == [(column.name, column.sql_type) for column in table.columns], table.name
            assert all(column.description.endswith(".") for column in table.columns)


def everything(connection: duckdb.DuckDBPyConnection) -> dict[str, list[tuple]]:
    """All rows of all tables but for the status of runs."""
    tables = {table.name: "*" for table in srl.store.TABLES} | {"runs": "run_id, config, path, steps"}
    return {name: connection.execute(f"SELECT {columns} FROM {name} ORDER BY ALL").fetchall()
            for name, columns in tables.items()}  # fmt: skip


def in_catalogue(run: Path) -> dict[str, list[tuple]]:
    """What any DuckDB client sees."""
    with duckdb.connect(run / "log" / "log.duckdb", read_only=True) as connection:
        return everything(connection)


def test_the_catalogue_and_every_state_of_a_log_say_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("srl.store.writer.COMPACT_AT", 3)
    log = new_log(tmp_path)
    for step in (1, 2, 3, 4, 5):
        write_step(log, step)
        with srl.store.open(tmp_path) as connection:
            before = everything(connection)
        assert in_catalogue(tmp_path) == before
    log.write_watches([{"step": 1, "phase": "train", "watch": "length_high", "metric": "m", "value": 2.0}])
    log.finish()
    assert {path.name for path in (tmp_path / "log").iterdir()} == {"manifest.json", "log.duckdb", "parts"}
    with srl.store.open(tmp_path) as connection:
        assert one(connection, "SELECT status FROM runs") == "finished"
        after = everything(connection)
    assert after == before | {"watches": after["watches"]}
    assert len(after["watches"]) == 1
    assert in_catalogue(tmp_path) == after


def test_the_catalogue_of_a_run_that_was_moved_is_written_anew_by_inspect(workspace):
    name = "20250102T030405Z-tiny-grpo-s1-00aa"
    with new_log(workspace / "elsewhere" / name) as log:
        write_step(log, 1)
    run = workspace / "runs" / name
    (workspace / "elsewhere").rename(run.parent)
    with pytest.raises(duckdb.IOException):
        in_catalogue(run)
    assert main(["inspect", "sql", "SELECT 1"]) == 0
    with srl.store.open(run) as connection:
        assert in_catalogue(run) == everything(connection)


@pytest.mark.parametrize(
    ("fitted", "passages", "shown", "answers"),
    [
        ({}, (KLEE, BERN), [None, None], [True, False]),
        ({"shown": 2}, (KLEE, BERN), ["whole", "whole"], [True, False]),
        ({"shown": 1}, (KLEE, BERN), ["whole", "none"], [True, False]),
        ({"shown": 1}, (BERN, KLEE), ["whole", "none"], [False, True]),
        ({"shown": 0}, (KLEE,), ["none"], [True]),
        ({"shown": 1, "cut": "Paul Klee … 1879."}, (KLEE, BERN), ["part", "none"], [False, False]),
        ({"shown": 1, "cut": "Paul … Münchenbuchsee in 1879."}, (KLEE, KLEE), ["part", "none"], [True, True]),
    ],
)
def test_the_log_says_which_passages_were_shown_and_looks_for_the_answer_there(
    tmp_path, fitted, passages, shown, answers
):
    made = episode(passages=passages)
    made.searches = [replace(made.searches[0], **fitted)]
    new_log(tmp_path).write(1, "train", [record(made)], {})
    with srl.store.open(tmp_path) as connection:
        found = connection.execute("SELECT shown, has_answer FROM hits ORDER BY rank").fetchall()
        gold, verdict = connection.execute("SELECT gold_in_passages, verdict FROM trajectories").fetchone()
        rank = one(connection, "SELECT gold_rank FROM searches")
        (read,) = srl.store.read_records(connection)
    assert found == list(zip(shown, answers, strict=True))
    assert rank == (answers.index(True) + 1 if True in answers else None)
    seen = any(answer for how, answer in found if how != "none")
    assert (gold, verdict) == (seen, "reader" if seen else "retriever")
    assert read.trajectory.searches == made.searches


@pytest.mark.parametrize(
    ("made", "verdict"),
    [
        ({"answer": "Münchenbuchsee"}, "correct"),
        ({"answer": "Bern"}, "reader"),
        ({"answer": "Bern", "passages": (BERN,)}, "retriever"),
        ({"answer": "Bern", "passages": None}, "no search"),
        ({"answer": None}, "unanswered"),
        ({"answer": None, "end": "failed"}, "failed search"),
    ],
)
def test_verdict_says_why_an_answer_is_wrong(tmp_path, made, verdict):
    new_log(tmp_path).write(1, "train", [record(episode(**made))], {})
    with srl.store.open(tmp_path) as connection:
        assert one(connection, "SELECT verdict FROM trajectories") == verdict


def test_exact_match_is_of_the_reward_where_it_has_one_and_computed_else(tmp_path):
    right = episode(answer="the münchenbuchsee")
    records = [Record(right), Record(right, Score(1.0, {"f1": 0.5})), Record(right, Score(0.0, {"em": 0.0}))]
    records += [Record(episode(asked=question(1, golds=())))]
    log = new_log(tmp_path)
    log.write(1, "train", records, {})
    with srl.store.open(tmp_path) as connection:
        rows = connection.execute("SELECT em, f1, reward FROM trajectories ORDER BY position").fetchall()
        assert rows == [(1.0, 1.0, None), (1.0, 0.5, 1.0), (0.0, 1.0, 0.0), (None, None, None)]


def test_a_search_says_whether_its_query_had_been_asked_and_its_question_has_an_answer(tmp_path):
    asking = episode(0)
    asking.searches = [
        search("Klee", KLEE, BERN), search("Bern", BERN, turn=1), search(" klee ", turn=2, status="empty")
    ]  # fmt: skip
    open_question = episode(1, asked=question(1, golds=()))
    open_question.searches = [search("Klee", KLEE)]
    new_log(tmp_path).write(1, "train", [record(asking), record(open_question)], {})
    query = "SELECT query, hits, gold_rank, judged, repeated FROM searches"
    with srl.store.open(tmp_path) as connection:
        found = connection.execute(query).fetchall()
    assert found == [
        ("Klee", 2, 1, True, False), ("Bern", 1, None, True, False), (" klee ", 0, None, True, True),
        ("Klee", 1, None, False, False),
    ]  # fmt: skip


# Two processes at one log: one changes it, the other is told by whom; a SIGKILL gives the lock back.


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
    return log_rows(run, "SELECT step, count(*) FROM trajectories GROUP BY 1 ORDER BY 1")


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
