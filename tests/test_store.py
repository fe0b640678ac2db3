from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, question, record, run_info, search, write_step

import srl.store
from srl.cli import main
from srl.errors import UserError
from srl.store import LogWriter, Record
from srl.store.schema import PARTS
from srl.trajectory import Score
from srl.workspace import Workspace


def one(connection: duckdb.DuckDBPyConnection, query: str):
    ((value,),) = connection.execute(query).fetchall()
    return value


def steps_of(path, table: str = "trajectories") -> list[int]:
    with srl.store.open(path) as connection:
        return [
            s for (s,) in connection.execute(f"SELECT DISTINCT step FROM {table} ORDER BY step").fetchall()
        ]


def test_finished_step_is_one_part_with_one_file_a_table(tmp_path):
    log = new_log(tmp_path)
    write_step(log, 1)
    (part,) = (tmp_path / "log" / "parts").iterdir()
    assert {path.stem for path in part.iterdir()} == set(PARTS)


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
    assert {path.name for path in (tmp_path / "log").iterdir()} == {
        "manifest.json", "log.duckdb", "parts", "watches.parquet"
    }  # fmt: skip
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


def test_what_is_no_log_and_another_format_are_refused(tmp_path):
    with pytest.raises(UserError):
        srl.store.open(tmp_path)
    new_log(tmp_path)
    manifest = tmp_path / "log" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(UserError):
        srl.store.open(tmp_path)


def test_log_of_a_run_that_wrote_nothing_yet_has_empty_tables(tmp_path):
    log = new_log(tmp_path)
    for finish in (False, True):
        if finish:
            log.finish()
        with srl.store.open(tmp_path) as connection:
            assert one(connection, "SELECT count(*) FROM trajectories") == 0
            assert one(connection, "SELECT count(*) FROM runs") == 1


def test_steps_show_the_common_metrics_as_columns_and_need_no_records(tmp_path):
    log = new_log(tmp_path)
    log.write(1, "val", [], {"val/em": 0.5, "env/finish_ratio": 0.75, "val/em/nq": 0.25})
    with srl.store.open(tmp_path) as connection:
        assert one(connection, "SELECT count(*) FROM metrics") == 3
        assert connection.execute("SELECT em, finish_ratio, score FROM steps").fetchall() == [
            (0.5, 0.75, None)
        ]


def test_log_is_found_from_run_log_and_folder_of_runs(tmp_path):
    for name in ("a", "b"):
        write_step(new_log(tmp_path / "runs" / name), 1)
    runs = tmp_path / "runs"
    for path, count in ((runs / "a", 1), (runs / "a" / "log", 1), (runs, 2), (tmp_path, 2)):
        with srl.store.open(path) as connection:
            assert one(connection, "SELECT count(DISTINCT run_id) FROM trajectories") == count


def test_path_with_pattern_letters_and_quotes_is_a_path(tmp_path):
    run = tmp_path / "it's [a] *"
    with new_log(run) as log:
        write_step(log, 1)
        assert steps_of(run) == [1]
    assert steps_of(run) == [1]


@pytest.mark.parametrize("folder", ["turns=4", "reward=f1", "step=7"])
def test_a_folder_called_like_a_column_changes_no_column(tmp_path, folder):
    query = "SELECT step, phase, turns, reward FROM trajectories ORDER BY ALL"
    found = {}
    for name in ("plain", folder):
        with new_log(tmp_path / name / "run") as log:
            write_step(log, 1)
            with srl.store.open(tmp_path / name / "run") as connection:
                found[name] = connection.execute(query).fetchall()
        with srl.store.open(tmp_path / name / "run") as connection:
            assert connection.execute(query).fetchall() == found[name]
    assert found[folder] == found["plain"]


def test_a_relative_workspace_with_a_colon_is_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Workspace.resolve("exp:1").new_run("tiny", "ppo", 0)
    with new_log(run) as log:
        write_step(log, 1)
        assert steps_of(run) == [1]
    monkeypatch.chdir(tmp_path / "exp:1" / "runs")
    assert steps_of(Path(run.name)) == [1]
    monkeypatch.chdir(tmp_path)
    assert steps_of(Path("exp:1") / "runs" / run.name) == [1]


@pytest.mark.parametrize("names", [("a", "b"), ("r.bak", "r")])
def test_a_copy_of_a_run_is_left_out_of_a_folder_of_runs(tmp_path, names, caplog):
    runs = [tmp_path / "runs" / name for name in names]
    kept = next((run for run in runs if run.name == "r"), runs[0])
    with new_log(kept) as log:
        write_step(log, 1)
    (copy,) = [run for run in runs if run != kept]
    shutil.copytree(kept, copy)
    with srl.store.open(tmp_path / "runs") as connection:
        assert connection.execute("SELECT path FROM runs").fetchall() == [(str(kept / "log"),)]
        assert one(connection, "SELECT count(*) FROM steps") == 1
    assert f"{copy} is left out: it is a copy of the run in {kept}" in caplog.text
    (tmp_path / "runs" / "link").symlink_to(kept)
    with srl.store.open(tmp_path / "runs") as connection:
        assert one(connection, "SELECT count(*) FROM steps") == 1
    assert "link" not in caplog.text
    assert steps_of(copy) == [1]


def test_gold_in_passages_looks_for_whole_normalised_words(tmp_path):
    found = {("the Münchenbuchsee!",): True, ("München",): False, ("Bern", "Aare"): True}
    log = new_log(tmp_path)
    episodes = [episode(n, asked=question(n, golds)) for n, golds in enumerate(found)]
    log.write(1, "train", [record(trajectory) for trajectory in episodes], {})
    with srl.store.open(tmp_path) as connection:
        rows = connection.execute("SELECT gold_in_passages FROM trajectories ORDER BY position").fetchall()
        assert [value for (value,) in rows] == list(found.values())


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
    log = new_log(tmp_path)
    log.write(1, "train", records, {})
    with srl.store.open(tmp_path) as connection:
        rows = connection.execute("SELECT em, f1, reward FROM trajectories ORDER BY position").fetchall()
        assert rows == [(1.0, 1.0, None), (1.0, 0.5, 1.0), (0.0, 1.0, 0.0)]


def test_without_golden_answers_nothing_is_right_or_wrong(tmp_path):
    new_log(tmp_path).write(1, "train", [Record(episode(asked=question(1, golds=())))], {})
    with srl.store.open(tmp_path) as connection:
        assert connection.execute("SELECT em, f1, verdict FROM trajectories").fetchall() == [
            (None, None, None)
        ]


def test_record_of_another_step_is_refused(tmp_path):
    log = new_log(tmp_path)
    with pytest.raises(ValueError, match="is of train step 1, but was passed as train step 2"):
        log.write(2, "train", [record(episode(step=1))], {})
    with pytest.raises(ValueError, match="tokens and 1 advantages"):
        log.write(1, "train", [Record(episode(), advantages=[1.0])], {})
    with pytest.raises(ValueError, match="counted from 0"):
        log.write(-1, "train", [], {})
    assert steps_of(tmp_path) == []


def test_lone_surrogate_does_not_stop_a_run(tmp_path):
    trajectory = episode(passages=None)
    trajectory.searches = [search("half a \ud83d smile", KLEE)]
    new_log(tmp_path).write(1, "train", [record(trajectory)], {})
    with srl.store.open(tmp_path) as connection:
        assert one(connection, "SELECT query FROM searches") == "half a ? smile"


def test_run_row_holds_what_the_run_is(tmp_path):
    log = LogWriter(tmp_path / "log", run_info("r"))
    write_step(log, 7)
    with srl.store.open(tmp_path) as connection:
        (row,) = srl.store.rows(connection, "FROM runs")
    described = {"preset": "tiny", "algo": "grpo", "seed": 1, "model": "tiny-model", "index_digest": "d1ce"}
    assert {name: row[name] for name in described} == described
    assert (row["steps"], row["status"], row["config"]) == (7, "running", '{"trainer": {"steps": 3}}')
    assert row["started"].isoformat() == "2025-01-02T03:04:05"


def test_reader_sees_whole_steps_only_while_another_process_writes(tmp_path):
    code = """
        import sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from store_builder import new_log, write_step
        import srl.store.writer
        srl.store.writer.COMPACT_AT = 4
        with new_log(Path(sys.argv[1])) as log:
            for step in range(1, 17):
                write_step(log, step, size=3)
                print(step, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(Path(__file__).parent)]
    query = """
        SELECT count(*), count(*) FILTER (found <> 3 OR pieces <> 12), max(step) FROM (
            SELECT step, count(*) AS found, sum(pieces) AS pieces FROM trajectories
            JOIN (SELECT trajectory_id AS id, count(*) AS pieces FROM segments GROUP BY ALL) USING (id)
            GROUP BY step)
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        seen = []
        for line in writer.stdout:
            seen.append(srl.store.reading([tmp_path], lambda c: c.execute(query).fetchall())[0])
            assert seen[-1][0] >= int(line)
    assert writer.returncode == 0
    assert all(broken == 0 and count == last for count, broken, last in seen)
    assert steps_of(tmp_path) == list(range(1, 17))


def test_a_query_spills_to_a_directory_of_its_own_that_goes_with_it(tmp_path):
    write_step(new_log(tmp_path), 1)

    def spill(connection):
        place = Path(one(connection, "SELECT current_setting('temp_directory')"))
        return place, place.is_absolute() and place.is_dir()

    place, was_there = srl.store.reading([tmp_path], spill)
    assert was_there
    assert not place.exists()


def test_connection_that_is_open_does_not_stop_the_writer(tmp_path):
    log = new_log(tmp_path)
    write_step(log, 1)
    with srl.store.open(tmp_path) as old:
        write_step(log, 2)
        assert one(old, "SELECT max(step) FROM steps") == 1
        log.finish()
    with srl.store.open(tmp_path) as old:
        log = new_log(tmp_path)
        log.drop_steps_after(1)
        assert one(old, "SELECT max(step) FROM steps") == 2
        write_step(log, 2)
        log.finish()
    assert steps_of(tmp_path) == [1, 2]


def test_two_threads_write_under_two_names(tmp_path):
    main = new_log(tmp_path)
    workers = [LogWriter(tmp_path / "log", run_info(tmp_path.name), worker=f"w{n}") for n in range(2)]

    def work(n: int) -> None:
        for step in (1, 2, 3):
            records = [record(episode(10 * n + i, step=step)) for i in range(2)]
            workers[n].write(step, "train", records, {})

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    main.write(3, "train", [], {"critic/score/mean": 0.5})
    for finished in (False, True):
        if finished:
            main.finish()
        with srl.store.open(tmp_path) as connection:
            rows = connection.execute("SELECT step, trajectories, score FROM steps ORDER BY step").fetchall()
            assert rows == [(1, 4, None), (2, 4, None), (3, 4, 0.5)]


def test_worker_does_not_end_a_run(tmp_path):
    with pytest.raises(UserError, match="only the main writer"):
        LogWriter(tmp_path / "log", run_info(), worker="w1").finish()


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


def test_opening_a_log_does_not_wait_for_pandas(tmp_path):
    log = new_log(tmp_path)
    write_step(log, 1)
    log.write_watches([{"step": 1, "phase": "train", "watch": "length_high", "metric": "m", "value": 2.0}])
    code = (
        "import sys, srl.store\n"
        f"with srl.store.open({str(tmp_path)!r}) as log:\n"
        "    (found,) = log.execute('SELECT watch, value FROM watches').fetchall()\n"
        "    records = srl.store.read_records(log)\n"
        "sys.exit(found != ('length_high', 2.0) or not records or 'pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_store_needs_no_torch():
    code = "import sys, srl.store; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
