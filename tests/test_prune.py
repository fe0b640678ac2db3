"""`srl inspect prune`: what goes and what stays."""

from __future__ import annotations

import json
import shutil
from hashlib import md5
from pathlib import Path

import pytest
from tests.store_builder import new_log, write_step

import srl.store
from srl.cli import main
from srl.errors import UserError
from srl.store import writer
from srl.store.beside import rescore_file, writing_rescores
from srl.store.prune import plan, prune
from srl.store.schema import RESCORE_SCHEMA

RUN = "20250102T030405Z-tiny-grpo-s1-00aa"
TABLES = ("trajectories", "segments", "searches", "hits", "rewards", "rescores", "steps", "metrics")
ALL = {(step, "train") for step in range(1, 7)} | {(3, "val"), (6, "val")}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Steps 1 to 6 of training with two episodes each, validation at 3 and 6, and a rescore of each."""
    run = tmp_path_factory.mktemp("made") / RUN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "COMPACT_AT", 3)
        log = new_log(run)
        for step in range(1, 7):
            write_step(log, step)
            if step % 3 == 0:
                write_step(log, step, "val")
        log.close("interrupted")
    with srl.store.open(run) as log:
        query = (
            "SELECT run_id, id AS trajectory_id, step, phase, 'f1=1' AS rewards, 'f1' AS measure, "
            "1.0 AS value, now()::TIMESTAMP AS written FROM trajectories"
        )
        with writing_rescores(rescore_file(run / "log", "f1=1")) as write:
            write(log.sql(query).to_arrow_table().cast(RESCORE_SCHEMA))
    return run


@pytest.fixture(params=["parts", "finished"])
def run(request, made, workspace) -> Path:
    run = shutil.copytree(made, workspace / "runs" / RUN)
    if request.param == "finished":
        new_log(run).finish()
    return run


def content(run: Path) -> dict[str, list[tuple]]:
    with srl.store.open(run) as log:
        return {table: log.execute(f"FROM {table} ORDER BY ALL").fetchall() for table in TABLES}


def with_trajectories(run: Path) -> set[tuple[int, str]]:
    return {row[2:4] for row in content(run)["trajectories"]}


def digest(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file): md5(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize(
    ("rule", "left"),
    [
        ({"steps": (2, 5), "phase": "train"}, {(1, "train"), (6, "train"), (3, "val"), (6, "val")}),
        ({"keep_every": 4}, {(4, "train"), (6, "train"), (6, "val")}),
        ({}, set()),
    ],
)
def test_the_trajectories_of_the_chosen_steps_go_and_the_metrics_stay(run, rule, left):
    before = content(run)
    gone = {(row["step"], row["phase"]) for row in plan(run / "log", **rule)}
    assert gone == ALL - left
    prune(run / "log", gone)
    after = content(run)
    for table in ("steps", "metrics"):
        assert after.pop(table) == before[table]
    for table, rows in after.items():
        assert rows == [
            row for row in before[table] if left & {(row[place], row[place + 1]) for place in (1, 2)}
        ]
    assert plan(run / "log", **rule) == []


def test_a_pruned_run_goes_on(run):
    prune(run / "log", {(1, "train"), (3, "val")})
    log = new_log(run)
    log.drop_steps_after(5)
    write_step(log, 6)
    log.finish()
    assert with_trajectories(run) == ALL - {(1, "train"), (3, "val"), (6, "val")}
    assert {row[1:3] for row in content(run)["steps"]} == ALL - {(6, "val")}


def test_without_yes_nothing_changes_and_the_rows_say_what_would_go(run, capsys):
    before = digest(run)
    typed = ["inspect", "prune", "last", "--steps", ":4", "--keep-every", "2"]
    assert main([*typed, "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {"phase": "train", "steps": 2, "first": 1, "last": 3, "trajectories": 4},
        {"phase": "val", "steps": 1, "first": 3, "last": 3, "trajectories": 2},
    ]
    assert digest(run) == before
    assert main([*typed, "--yes"]) == 0
    assert with_trajectories(run) == ALL - {(1, "train"), (3, "train"), (3, "val")}


@pytest.mark.parametrize(
    "typed", [[], ["--steps", "many"], ["--phase", "eval"], ["--keep-every", "0"]], ids=" ".join
)
def test_a_mistake_prunes_nothing(made, workspace, capsys, typed):
    run = shutil.copytree(made, workspace / "runs" / RUN)
    before = digest(run)
    assert main(["inspect", "prune", "last", "--yes", *typed]) == 2
    assert digest(run) == before


def test_evaluations_runs_that_are_written_and_damaged_logs_are_refused(made, workspace):
    run = shutil.copytree(made, workspace / "runs" / RUN)
    log = new_log(run)
    write_step(log, 0, "eval")
    with pytest.raises(UserError, match="running"):
        prune(run / "log", {(1, "train")})
    log.close("interrupted")
    assert {row["phase"] for row in plan(run / "log")} == {"train", "val"}
    for file in (run / "log" / "parts").glob("*/segments.parquet"):
        file.write_bytes(b"PAR1")
    before = digest(run)
    with pytest.raises(UserError, match=r"segments\.parquet"):
        prune(run / "log", {(1, "train")})
    assert digest(run) == before
