"""`srl inspect sizes`, `prune` and `merge`: bytes, what goes and what stays, kills, clashes, live writers."""

from __future__ import annotations

import errno
import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from hashlib import md5
from itertools import count
from pathlib import Path

import pytest
from tests.store_builder import episode, new_log, record, write_step

import srl.store
from srl import files
from srl.cli import main
from srl.errors import UserError
from srl.store import finished as finished_log
from srl.store import parts, run_info, writer
from srl.store import prune as pruning
from srl.store import sizes as log_sizes
from srl.store.merge import merge_logs
from srl.store.prune import Rule, plan, prune
from srl.store.rescores import rescore_file, writing_rescores
from srl.store.schema import RESCORE_SCHEMA
from srl.store.sizes import sizes
from srl.store.watches import watch_file, write_watches

RUN, OTHER = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"
TABLES = ("trajectories", "segments", "searches", "hits", "rewards", "steps", "metrics", "rescores")


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict[str, Path]:
    """Steps 1 to 6 of training with two episodes each, validation at 3 and 6: as parts, and finished."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "COMPACT_AT", 3)
        parts = written(tmp_path_factory.mktemp("made") / RUN, range(1, 7))
    finished = shutil.copytree(parts, tmp_path_factory.mktemp("made") / RUN)
    new_log(finished).finish()
    return {"parts": parts, "finished": finished}


@pytest.fixture(params=["parts", "finished"])
def run(request, made, workspace) -> Path:
    return shutil.copytree(made[request.param], workspace / "runs" / RUN)


def written(run: Path, steps, phase="train", *, finish=False, **changes) -> Path:
    log = new_log(run)
    for step in steps:
        write_step(log, step, phase, **changes)
        if step % 3 == 0 and phase == "train":
            write_step(log, step, "val")
    if finish:
        log.finish()
    else:
        log.close("interrupted")
    return run


def counts(run: Path, table="trajectories") -> dict[tuple[int, str], int]:
    with srl.store.open(run) as log:
        query = f"SELECT step, phase, count(*) FROM {table} GROUP BY ALL"
        return {(step, phase): count for step, phase, count in log.execute(query).fetchall()}


def content(*paths: Path) -> dict[str, list[tuple]]:
    with srl.store.open(*paths) as log:
        return {table: log.execute(f"FROM {table} ORDER BY ALL").fetchall() for table in TABLES}


def digest(run: Path) -> dict[str, str]:
    files = sorted(file for file in run.rglob("*") if file.is_file())
    return {str(file.relative_to(run)): md5(file.read_bytes()).hexdigest() for file in files}


def rescored(run: Path) -> None:
    """A rescore of each trajectory."""
    with srl.store.open(run) as log:
        found = log.sql(
            "SELECT run_id, id AS trajectory_id, step, phase, 'f1=1' AS rewards, 'f1' AS measure, "
            "1.0 AS value, now()::TIMESTAMP AS written FROM trajectories"
        ).to_arrow_table()
    with writing_rescores(rescore_file(run / "log", "f1=1")) as write:
        write(found.cast(RESCORE_SCHEMA))


def fired(step: int, **changes: object) -> dict[str, object]:
    """The row of a watch."""
    row = {"step": step, "phase": "train", "watch": "w", "metric": "m", "value": 1.0, "since": 1}
    return row | changes


def cut(file: Path) -> Path:
    """Lose the end of a file, as in a copy that was broken off."""
    file.write_bytes(file.read_bytes()[:-20])
    return file


def garble(file: Path) -> Path:
    """Lose what is in a file; its end, which describes it, stays."""
    data = file.read_bytes()
    file.write_bytes(data[:4] + bytes(200) + data[204:])
    return file


@pytest.fixture
def times(monkeypatch) -> None:
    """Each look at the clock is a second after the one before."""
    seconds = count()
    clock = lambda: datetime.fromtimestamp(next(seconds), UTC).isoformat(timespec="seconds")  # noqa: E731
    monkeypatch.setattr(run_info, "now", clock)


TRAINED = {(step, "train"): 2 for step in range(1, 7)}
ALL = TRAINED | {(3, "val"): 2, (6, "val"): 2}


def test_sizes_are_those_of_the_directory(run):
    rescored(run)
    found = {size.table: size for size in sizes(run / "log")}
    files = [file for file in (run / "log").rglob("*") if file.is_file()]
    assert sum(size.bytes for size in found.values()) == sum(file.stat().st_size for file in files)
    assert {name: found[name].rows for name in ("trajectories", "segments", "searches", "steps")} == {
        "trajectories": 16, "segments": 64, "searches": 16, "steps": 8
    }  # fmt: skip
    assert found["rescores"].rows == 16
    assert all(found[name].bytes > 0 for name in ("trajectories", "segments", "rescores", "other"))


def test_damaged_files_have_bytes_and_no_rows_in_sizes(made, workspace, capsys):
    run = shutil.copytree(made["parts"], workspace / "runs" / RUN)
    rescored(run)
    cut(rescore_file(run / "log", "f1=1"))
    for file in (run / "log" / "parts").glob("*/segments.parquet"):
        file.write_bytes(b"")
    assert main(["inspect", "sizes", "last", "--json"]) == 0
    found = {row["table"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert (found["rescores"]["rows"], found["segments"]["rows"], found["trajectories"]["rows"]) == (0, 0, 16)
    assert found["rescores"]["bytes"] > 0


@pytest.mark.parametrize("times", [1, log_sizes.TRIES])
def test_sizes_are_counted_again_if_the_writer_replaced_a_part_meanwhile(made, monkeypatch, times):
    log = made["parts"] / "log"
    right, replaced = sizes(log), [log / "gone.parquet"] * times
    listed = log_sizes.live_parts

    def moved(*arguments: object, **options: object) -> list[parts.Part]:
        if replaced:
            replaced.pop().stat()
        return listed(*arguments, **options)

    monkeypatch.setattr(log_sizes, "live_parts", moved)
    if times < log_sizes.TRIES:
        assert sizes(log) == right
    else:
        with pytest.raises(FileNotFoundError):
            sizes(log)
    assert not replaced


def test_sizes_are_shown_by_table_and_as_json(run, capsys):
    assert main(["inspect", "sizes", "last", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["table"] for row in rows] == ["trajectories", "segments", "searches", "steps", "other"]
    assert main(["inspect", "sizes"]) == 0
    assert "segments" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        (Rule(steps=(2, 5), phase="train"), {(1, "train"), (6, "train"), (3, "val"), (6, "val")}),
        (Rule(keep_every=4), {(4, "train"), (6, "train"), (6, "val")}),
        (Rule(before=datetime(2200, 1, 1)), set()),
    ],
)
def test_the_trajectories_of_the_chosen_steps_go_and_the_metrics_stay(run, rule, left):
    rescored(run)
    before = content(run)
    gone = {(one.step, one.phase) for one in plan(run / "log", rule)}
    assert gone == ALL.keys() - left
    prune(run / "log", gone)
    after = content(run)
    assert after["steps"] == before["steps"]
    assert after["metrics"] == before["metrics"]
    for table in ("trajectories", "segments", "searches", "hits", "rewards", "rescores"):
        kept = [row for row in before[table] if left & {(row[place], row[place + 1]) for place in (1, 2)}]
        assert after[table] == kept
    assert plan(run / "log", rule) == []


def test_a_pruned_run_goes_on_and_is_finished(run):
    prune(run / "log", {(1, "train"), (3, "val")})
    log = new_log(run)
    log.drop_steps_after(5)
    write_step(log, 6)
    log.finish()
    assert counts(run) == dict.fromkeys(ALL.keys() - {(1, "train"), (3, "val"), (6, "val")}, 2)
    assert counts(run, "steps").keys() == ALL.keys() - {(6, "val")}


def test_without_yes_nothing_changes_and_the_rows_say_what_would_go(run, capsys):
    before = digest(run)
    typed = ["inspect", "prune", "last", "--steps", ":4", "--keep-every", "2"]
    assert main([*typed, "--json"]) == 0
    shown = capsys.readouterr()
    rows = [json.loads(line) for line in shown.out.splitlines()]
    assert [{name: row[name] for name in row if name != "bytes"} for row in rows] == [
        {"phase": "train", "steps": 2, "first": 1, "last": 3, "trajectories": 4},
        {"phase": "val", "steps": 1, "first": 3, "last": 3, "trajectories": 2},
    ]
    takes = sum(size.bytes for size in sizes(run / "log"))
    assert 0 < sum(row["bytes"] for row in rows) < takes
    assert "--yes" in shown.err
    assert digest(run) == before
    assert main([*typed, "--yes"]) == 0
    assert counts(run) == dict.fromkeys(ALL.keys() - {(1, "train"), (3, "train"), (3, "val")}, 2)


def test_age_is_counted_in_days(run, capsys):
    assert main(["inspect", "prune", "last", "--older-than", "1000000", "--yes"]) == 0
    assert main(["inspect", "prune", "last", "--older-than", "1", "--yes"]) == 0
    assert counts(run) == ALL
    assert "nothing is pruned" in capsys.readouterr().err
    assert main(["inspect", "prune", "last", "--older-than", "0", "--yes"]) == 0
    assert counts(run) == {}


@pytest.mark.parametrize("fails", [False, True])
def test_rescores_go_last_and_a_repeated_prune_removes_those_that_a_kill_left(
    run, monkeypatch, capsys, fails
):
    rescored(run)
    rule = Rule(steps=(1, 2))
    typed = ["inspect", "prune", "last", "--steps", "1:2", "--yes"]

    def die(*arguments):
        raise OSError(errno.ENOSPC, "no space") if fails else Killed

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "drop_rescores", die)
        if fails:
            assert main(typed) == 2
            said = "was pruned, but not all rescores: the disk is full; free some space; repeat the command"
            assert said in capsys.readouterr().err
        else:
            with pytest.raises(Killed):
                prune(run / "log", {(1, "train"), (2, "train")})
    left = dict.fromkeys(ALL.keys() - {(1, "train"), (2, "train")}, 2)
    assert (counts(run), counts(run, "rescores")) == (left, ALL)
    assert [(one.step, one.phase, one.trajectories) for one in plan(run / "log", rule)] == [
        (1, "train", 0), (2, "train", 0)
    ]  # fmt: skip
    assert main(typed) == 0
    assert (counts(run), counts(run, "rescores")) == (left, left)
    assert plan(run / "log", rule) == []


def test_a_prune_that_fails_leaves_log_and_rescores_as_they_were(run, monkeypatch):
    rescored(run)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "no space")

    for place, name in ((pruning, "write_database"), (pruning, "merge_parts")):
        monkeypatch.setattr(place, name, full)
    with pytest.raises(UserError, match=r"was not pruned: the disk is full; .*; it is as it was"):
        prune(run / "log", {(1, "train")})
    assert (counts(run), counts(run, "rescores")) == (ALL, ALL)


def test_the_last_step_that_stays_is_one_with_trajectories_not_with_rescores_alone(run, monkeypatch):
    rescored(run)
    with monkeypatch.context() as patch:
        patch.setattr(pruning, "drop_rescores", lambda *arguments: None)
        prune(run / "log", {(6, "train")})
    gone = plan(run / "log", Rule(keep_every=7, phase="train"))
    assert [one.step for one in gone] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_kill_leaves_the_log_as_it_was_or_pruned(run, monkeypatch, place):
    rescored(run)
    gone = {(1, "train"), (2, "train")}
    is_finished = (run / "log" / "log.duckdb").exists()

    rmtree = shutil.rmtree

    def die(*arguments, **options):
        raise Killed

    def die_at_last(path, **options):
        if path.name.startswith(".log.duckdb."):
            raise Killed
        rmtree(path, **options)

    with monkeypatch.context() as patch:
        if place == "before" and is_finished:
            patch.setattr(finished_log, "create_views", die)
        elif place == "before":
            patch.setattr(parts, "with_current_columns", die)
        else:
            patch.setattr(pruning, "sweep", die)
            patch.setattr(files.shutil, "rmtree", die_at_last)
        with pytest.raises(Killed):
            prune(run / "log", gone)
    assert counts(run) == (ALL if place == "before" else dict.fromkeys(ALL.keys() - gone, 2))
    prune(run / "log", gone)
    assert counts(run) == dict.fromkeys(ALL.keys() - gone, 2)
    assert not list((run / "log").glob(".*.tmp-*"))


def test_a_log_that_is_being_written_is_not_pruned(workspace, capsys):
    log = new_log(workspace / "runs" / RUN)
    write_step(log, 1)
    before = digest(workspace)
    assert main(["inspect", "prune", "last", "--steps", "1", "--yes"]) == 2
    err = capsys.readouterr().err
    assert f"being written by process {os.getpid()}" in err
    assert err.count("\n") == 1
    manifest = workspace / "runs" / RUN / "log" / "manifest.json"
    told = json.loads(manifest.read_text())
    told["writer"]["host"] = "node-7"
    manifest.write_text(json.dumps(told))
    assert main(["inspect", "prune", "last", "--steps", "1", "--yes"]) == 2
    assert "on node-7; type the command on that machine" in capsys.readouterr().err
    assert counts(workspace / "runs" / RUN) == {(1, "train"): 2}
    assert digest(workspace).keys() == before.keys()


@pytest.mark.parametrize(
    ("typed", "said"),
    [([], "which steps?"), (["--steps", "many"], "--steps many: expected a step"),
     (["--phase", "eval"], "scores of an evaluation"), (["--keep-every", "0"], "--keep-every")],
)  # fmt: skip
def test_a_mistake_is_one_line_and_prunes_nothing(workspace, capsys, typed, said):
    run = written(workspace / "runs" / RUN, [1, 2])
    before = digest(run)
    assert main(["inspect", "prune", "last", "--yes", *typed]) == 2
    assert said in capsys.readouterr().err
    assert digest(run) == before


def test_an_evaluation_keeps_its_trajectories(workspace):
    run = written(workspace / "runs" / RUN, [0], "eval", finish=True)
    with pytest.raises(UserError, match="removed with its directory"):
        plan(run / "log", Rule(before=datetime.max))


def test_a_damaged_log_is_not_pruned(workspace):
    run = written(workspace / "runs" / RUN, [1, 2])
    [part] = (run / "log" / "parts").glob("step-000002*")
    (part / "segments.parquet").write_bytes(b"PAR1")
    before = digest(run)
    with pytest.raises(UserError, match=r"segments\.parquet"):
        prune(run / "log", {(1, "train")})
    assert digest(run) == before


@pytest.mark.parametrize("harm", [cut, garble])
def test_a_log_with_damaged_rescores_is_not_pruned(run, capsys, harm):
    rescored(run)
    file = harm(rescore_file(run / "log", "f1=1"))
    before = digest(run)
    assert main(["inspect", "prune", "last", "--steps", "1", "--yes"]) == 2
    assert f"srl: run {RUN}: {file}: " in capsys.readouterr().err.splitlines()[-1]
    assert digest(run) == before


def test_runs_of_two_machines_are_merged_and_say_the_same(tmp_path, capsys):
    one = written(tmp_path / "a" / "runs" / RUN, range(1, 5), finish=True)
    rescored(one)
    two = written(tmp_path / "b" / "runs" / OTHER, range(1, 3))
    out = tmp_path / "all"
    assert main(["inspect", "merge", str(tmp_path / "a"), str(two), "-o", str(out), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"run_id": RUN, "logs": 1, "steps": 5, "trajectories": 10},
        {"run_id": OTHER, "logs": 1, "steps": 2, "trajectories": 4},
    ]
    assert content(out / "runs") == content(one, two)
    assert main(["--workspace", str(out), "inspect", "runs", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["run_id"], row["status"]) for row in rows] == [(RUN, "finished"), (OTHER, "interrupted")]


def test_a_run_that_went_on_elsewhere_becomes_one(tmp_path, times):
    one = written(tmp_path / "a" / RUN, range(1, 4))
    two = written(tmp_path / "b" / RUN, range(4, 7), finish=True)
    for number, path in enumerate((one, two), start=1):
        rescored(path)
        write_watches(path / "log", RUN, [fired(number)])
    [merged] = merge_logs([two, one, one], tmp_path / "all")
    assert (merged.logs, merged.steps, merged.trajectories) == (2, 8, 16)
    assert content(tmp_path / "all") == content(one, two)
    with srl.store.open(tmp_path / "all") as log:
        assert log.execute("SELECT number, step FROM watches ORDER BY ALL").fetchall() == [(1, 1), (2, 2)]
        assert log.execute("SELECT run_id, status FROM runs").fetchall() == [(RUN, "finished")]


@pytest.mark.parametrize("name", ["", "..", "../away", "/tmp/away"])
def test_a_log_whose_run_has_no_name_of_a_directory_is_damaged(tmp_path, capsys, name):
    """A log from somebody else cannot have a merge write outside of --out."""
    run = written(tmp_path / "a" / "runs" / RUN, range(1, 3))
    manifest = json.loads((run / "log" / "manifest.json").read_text())
    manifest["run"]["run_id"] = name
    (run / "log" / "manifest.json").write_text(json.dumps(manifest))
    before = sorted(tmp_path.rglob("*"))
    assert main(["inspect", "merge", str(run), "-o", str(tmp_path / "all")]) == 2
    assert "run_id is the name of a directory" in capsys.readouterr().err
    assert [path for path in sorted(tmp_path.rglob("*")) if path not in before] == []


def test_watches_of_a_merged_log_have_the_order_in_which_they_fired(tmp_path, times):
    """A run that was rolled back from step 8 to 5, and went on elsewhere from the checkpoint of step 7."""
    one = written(tmp_path / "a" / RUN, range(1, 8))
    two = written(tmp_path / "b" / RUN, range(8, 10))
    write_watches(one / "log", RUN, [fired(8, to_step=5), fired(6), fired(7), fired(9)])
    write_watches(two / "log", RUN, [fired(8, to_step=5), fired(6), fired(7), fired(8)])
    merge_logs([two, one], tmp_path / "all")
    with srl.store.open(tmp_path / "all") as log:
        found = log.execute("SELECT number, step FROM watches ORDER BY number").fetchall()
    assert found == [(1, 8), (2, 6), (3, 7), (4, 9), (5, 8)]


@pytest.mark.parametrize("harm", [cut, garble])
@pytest.mark.parametrize("table", ["watches", "rescores"])
def test_a_damaged_file_beside_a_log_is_one_line_in_a_merge(tmp_path, capsys, harm, table):
    run = written(tmp_path / RUN, [1], finish=True)
    rescored(run)
    write_watches(run / "log", RUN, [fired(1)])
    file = harm(watch_file(run / "log") if table == "watches" else rescore_file(run / "log", "f1=1"))
    assert main(["inspect", "merge", str(run), "-o", str(tmp_path / "all")]) == 2
    err = capsys.readouterr().err
    assert f"{file} is damaged: " in err
    assert err.count("\n") == 1
    assert not (tmp_path / "all").exists()


def test_shards_of_an_evaluation_become_one_and_the_same_question_twice_is_refused(tmp_path):
    for machine, numbers in (("a", (0, 1)), ("b", (2, 3)), ("c", (3, 4))):
        log = new_log(tmp_path / machine / RUN)
        log.write(0, "eval", [record(episode(n, step=0, phase="eval")) for n in numbers], {})
        log.finish()
    [merged] = merge_logs([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert (merged.logs, merged.trajectories) == (2, 4)
    with pytest.raises(UserError, match=f"{RUN}: trajectory .* is in .*b.* and in .*c"):
        merge_logs([tmp_path / "b", tmp_path / "c"], tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_run_that_went_on_elsewhere_with_more_steps_is_one(tmp_path):
    """In a workspace at another path, with `--resume --steps`."""
    one, two = written(tmp_path / "a" / RUN, range(1, 4)), written(tmp_path / "b" / RUN, range(4, 6))
    for run in (one, two):
        manifest = run / "log" / "manifest.json"
        found = json.loads(manifest.read_text())
        found["run"] |= {"model": f"{run}/model", "config": {"search": {"index": f"{run}/index"}}}
        manifest.write_text(json.dumps(found))
    found["run"]["config"]["extended"] = [{"before": 3, "after": 5}]
    manifest.write_text(json.dumps(found))
    [merged] = merge_logs([one, two], tmp_path / "all")
    assert (merged.logs, merged.steps) == (2, 6), "five of training, one of validation"


def test_clashes_are_refused_and_nothing_is_written(tmp_path, capsys):
    one = written(tmp_path / "a" / RUN, range(1, 4))
    two = written(tmp_path / "b" / RUN, range(3, 5))
    out = tmp_path / "all"
    assert main(["inspect", "merge", str(one), str(two), "-o", str(out)]) == 2
    assert f"{RUN}: train step 3 is in {one} and in {two}" in capsys.readouterr().err
    manifest = two / "log" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"tiny-model"', '"other-model"'))
    assert main(["inspect", "merge", str(one), str(two), "-o", str(out)]) == 2
    err = capsys.readouterr().err
    assert "they differ in model" in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_a_log_that_is_being_written_or_a_place_that_is_taken_is_refused(tmp_path):
    one = written(tmp_path / "a" / RUN, [1])
    log = new_log(tmp_path / "b" / OTHER)
    write_step(log, 1)
    with pytest.raises(UserError, match="is being written"):
        merge_logs([tmp_path / "b"], tmp_path / "all")
    with pytest.raises(UserError, match="exists already"):
        merge_logs([one], tmp_path / "a")
    with pytest.raises(UserError, match="no log in"):
        merge_logs([one, tmp_path / "nothing"], tmp_path / "all")
    assert not (tmp_path / "all").exists()


def test_times_of_a_merged_log_are_those_of_its_run(tmp_path):
    one = written(tmp_path / RUN, [1], finish=True)
    merge_logs([one], tmp_path / "all")
    query = "SELECT * EXCLUDE (path) FROM runs"
    with srl.store.open(one) as before, srl.store.open(tmp_path / "all") as after:
        assert after.execute(query).fetchall() == before.execute(query).fetchall()
        [(seconds,)] = after.execute("SELECT seconds FROM runs").fetchall()
    assert timedelta(seconds=seconds) < timedelta(minutes=5)
