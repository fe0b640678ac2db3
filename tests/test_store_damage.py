"""A log with damaged files is read without them, and a resumed run sets them aside and ends whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import duckdb
import pytest
from tests.store_builder import new_log, run_info, write_step

import srl.store
from srl.browse.sql import sql
from srl.errors import UserError
from srl.store import LogWriter, damage, parts, reader, writer

GOOD, BAD = "20250102T030405Z-tiny-grpo-s1-00aa", "20250103T030405Z-tiny-ppo-s1-01ab"


def cut_short(part: Path) -> None:
    file = part / "trajectories.parquet"
    file.write_bytes(file.read_bytes()[:50])


def emptied(part: Path) -> None:
    (part / "searches.parquet").write_bytes(b"")


def overwritten(part: Path) -> None:
    """Every page is garbage, and what the file says of them at its end is whole."""
    file = part / "segments.parquet"
    content = file.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little") + 8
    file.write_bytes(content[:4] + b"\xff" * (len(content) - footer - 4) + content[-footer:])


def missing(part: Path) -> None:
    (part / "steps.parquet").unlink()


HARMS = [cut_short, emptied, overwritten, missing]


def part_of(run: Path, step: int) -> Path:
    (found,) = (run / "log" / "parts").glob(f"step-{step:06d}-*")
    return found


def steps(connection) -> list[int]:
    """The steps whose rows can be read, in every table."""
    for table in ("trajectories", "segments", "searches"):
        connection.execute(f"SELECT count(hash(one)) FROM {table} AS one")
    return [step for (step,) in connection.execute("SELECT step FROM steps ORDER BY step").fetchall()]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run of three steps that nothing is wrong with, and one to damage."""
    for name in (GOOD, BAD):
        log = new_log(tmp_path / name)
        for step in (1, 2, 3):
            write_step(log, step)
    return tmp_path


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_part_is_left_out_and_named(runs, harm):
    harm(part_of(runs / BAD, 2))
    said: list[str] = []
    assert srl.store.reading([runs / BAD], steps, warn=said.append) == [1, 3]
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 1, 2, 3, 3]
    assert len(said) == 2
    for line in said:
        assert "\n" not in line
        assert all(text in line for text in (BAD, "parquet", "train step 2", f"--resume --run {BAD}")), line


def test_a_compacted_part_that_does_not_say_what_it_replaces_is_left_out(runs, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_AT", 4)
    log = LogWriter(runs / BAD / "log", run_info(BAD))
    for step in (4, 5):
        write_step(log, step)
    parts.sweep(runs / BAD / "log" / "parts")
    (compacted,) = (runs / BAD / "log" / "parts").glob("steps-*/part.json")
    compacted.write_text("{")
    said: list[str] = []
    assert srl.store.reading([runs / BAD], steps, warn=said.append) == [5]
    assert "steps 1 to 4" in said[0]


def test_a_part_that_another_replaced_may_be_damaged(runs, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_AT", 4)
    write_step(LogWriter(runs / BAD / "log", run_info(BAD)), 4)
    cut_short(part_of(runs / BAD, 2))
    said: list[str] = []
    assert srl.store.reading([runs / BAD], steps, warn=said.append) == [1, 2, 3, 4]
    assert said == []


def test_a_notebook_opens_what_is_left(runs, caplog):
    cut_short(part_of(runs / BAD, 2))
    with srl.store.open(runs / BAD) as connection:
        assert steps(connection) == [1, 3]
    assert BAD in caplog.text


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", b"{"),
        ("manifest.json", b"[]"),
        ("manifest.json", b'{"format": 1, "kind": "log"}'),
        ("manifest.json", b'{"format": 9, "kind": "log"}'),
        ("log.duckdb", b""),
        ("log.duckdb", None),
    ],
)
def test_a_run_that_cannot_be_read_is_left_out_and_named(runs, name, content):
    LogWriter(runs / BAD / "log", run_info(BAD)).finish()
    file = runs / BAD / "log" / name
    file.write_bytes(file.read_bytes()[:20_000] if content is None else content)
    said: list[str] = []
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 2, 3]
    (line,) = said
    assert all(text in line for text in (BAD, name, "left out: "))
    with pytest.raises(UserError, match=name):
        srl.store.reading([runs / BAD], steps, warn=said.append)
    assert len(said) == 1


def without_log(run: Path) -> None:
    shutil.rmtree(run / "log")


def with_a_file_for_log(run: Path) -> None:
    without_log(run)
    (run / "log").write_text("")


def without_manifest(run: Path) -> None:
    (run / "log" / "manifest.json").unlink()


@pytest.mark.parametrize("harm", [without_log, with_a_file_for_log, without_manifest])
def test_a_run_that_lost_its_log_is_named(runs, harm):
    (runs / BAD / "run.json").write_text("{}")
    (runs / BAD / "checkpoints" / "step-000002").mkdir(parents=True)
    harm(runs / BAD)
    said: list[str] = []
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 2, 3]
    (line,) = said
    assert f"run {BAD}: no log in {runs / BAD / 'log'}: it" in line
    assert "left out: the run" in line
    with pytest.raises(UserError, match=f"run {BAD}: no log in"):
        srl.store.reading([runs / BAD], steps, warn=said.append)


def test_a_run_that_is_being_set_up_alarms_nobody(runs):
    without_log(runs / BAD)
    for name in ("run.json", "config.yaml"):
        (runs / BAD / name).write_text("{}")
    (runs / "notes").mkdir()
    said: list[str] = []
    for begun in (False, True):
        assert srl.store.reading([runs], steps, warn=said.append) == [1, 2, 3]
        if not begun:
            (runs / BAD / "log").mkdir()
    assert said == []


def test_a_database_with_garbage_in_the_middle_is_left_out(runs):
    log = LogWriter(runs / BAD / "log", run_info(BAD))
    write_step(log, 4, size=300)
    log.finish()
    file = runs / BAD / "log" / "log.duckdb"
    content = bytearray(file.read_bytes())
    content[3 * 4096 : -4096] = b"\xff" * (len(content) - 4 * 4096)
    file.write_bytes(content)
    said: list[str] = []
    assert srl.store.reading([runs], steps, warn=said.append) == [1, 2, 3]
    assert len(said) == 1


def test_a_run_with_no_part_that_can_be_read_is_one_line(runs):
    for step in (1, 2, 3):
        cut_short(part_of(runs / BAD, step))
    with pytest.raises(UserError, match=r"trajectories\.parquet") as error:
        srl.store.reading([runs / BAD], steps, warn=pytest.fail)
    assert "\n" not in str(error.value)


def test_a_log_that_is_finished_under_a_reader_is_read_again(runs):
    writer = LogWriter(runs / BAD / "log", run_info(BAD))

    def read(connection):
        if (runs / BAD / "log" / "parts").exists():
            writer.finish()
        return steps(connection)

    assert srl.store.reading([runs], read, warn=pytest.fail) == [1, 1, 2, 2, 3, 3]


def test_nothing_looks_for_damage_in_a_log_that_reads_well(runs, monkeypatch):
    monkeypatch.setattr(reader, "further_damage", lambda *_, **__: pytest.fail("looked"))
    assert srl.store.reading([runs], steps) == [1, 1, 2, 2, 3, 3]
    with pytest.raises(UserError):
        srl.store.reading([runs], lambda log: (_ for _ in ()).throw(UserError("no such trajectory")))


@pytest.mark.parametrize(
    "query",
    ["SELECT regexp_matches(question, '(') FROM trajectories", "SELECT question::INT FROM trajectories",
     "SELECT if(step = 3, error('here'), step) FROM steps", "SELECT error(question) FROM trajectories"],
)  # fmt: skip
def test_a_fault_in_a_query_is_no_damage(runs, monkeypatch, query):
    monkeypatch.setattr(reader, "further_damage", lambda *_, **__: pytest.fail("looked"))
    for read in (lambda log: sql(log, query), lambda log: log.execute(query).fetchall()):
        with pytest.raises(UserError):
            srl.store.reading([runs], read)


@pytest.mark.parametrize("harm", HARMS)
def test_a_query_is_answered_from_what_is_left(runs, harm):
    harm(part_of(runs / BAD, 2))
    query = (
        "SELECT count(hash(t)), (SELECT count(hash(s)) FROM segments AS s), (SELECT count(*) FROM searches) "
    )
    warned: list[str] = []
    answer = srl.store.reading(
        [runs], lambda log: sql(log, f"{query} FROM trajectories AS t, steps"), warn=warned.append
    )
    assert len(answer.rows) == 1
    assert len(warned) == 1


@pytest.mark.parametrize("harm", HARMS)
def test_a_resumed_run_sets_a_damaged_part_aside_and_ends_whole(runs, harm):
    harm(part_of(runs / BAD, 2))
    said: list[str] = []
    with LogWriter(runs / BAD / "log", run_info(BAD), warn=said.append) as log:
        log.drop_steps_after(2)
        write_step(log, 3)
        write_step(log, 4)
    (line,) = said
    assert "train step 2" in line
    assert "damaged/step-000002-train-main-000002" in line
    assert (runs / BAD / "log" / "damaged" / "step-000002-train-main-000002").is_dir()
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 3, 4]


def test_a_resumed_run_trains_again_what_came_after_its_checkpoint(runs):
    cut_short(part_of(runs / BAD, 2))
    with LogWriter(runs / BAD / "log", run_info(BAD), warn=lambda _: None) as log:
        log.drop_steps_after(1)
        write_step(log, 2)
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 2]


@pytest.mark.parametrize("harm", HARMS)
def test_a_part_damaged_while_the_run_goes_stops_no_compaction(runs, harm, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_AT", 4)
    said: list[str] = []
    with LogWriter(runs / BAD / "log", run_info(BAD), warn=said.append) as log:
        harm(part_of(runs / BAD, 2))
        for step in (4, 5):
            write_step(log, step)
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 3, 4, 5]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["manifest.json", "log.duckdb"])
def test_a_resumed_run_sets_a_damaged_manifest_or_database_aside(runs, name):
    LogWriter(runs / BAD / "log", run_info(BAD)).finish()
    (runs / BAD / "log" / name).write_text("{")
    said: list[str] = []
    with LogWriter(runs / BAD / "log", run_info(BAD), warn=said.append) as log:
        log.drop_steps_after(2)
        write_step(log, 3)
    assert name in said[0]
    expected = [1, 2, 3] if name == "manifest.json" else [3]
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == expected


def test_a_manifest_of_a_newer_srl_is_not_set_aside(runs):
    manifest = runs / BAD / "log" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 9}))
    with pytest.raises(UserError, match="format 9"):
        LogWriter(runs / BAD / "log", run_info(BAD))
    assert manifest.exists()


def test_a_database_that_another_program_holds_is_not_set_aside(runs, monkeypatch):
    LogWriter(runs / BAD / "log", run_info(BAD)).finish()

    def held(*_):
        raise duckdb.IOException("IO Error: Could not set lock on file: Conflicting lock is held")

    with monkeypatch.context() as patch:
        patch.setattr(damage, "attach", held)
        with pytest.raises(UserError, match="Conflicting lock"):
            LogWriter(runs / BAD / "log", run_info(BAD))
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 2, 3]


@pytest.mark.parametrize(
    "error", [PermissionError(13, "no"), OSError(24, "too many open files"), MemoryError()]
)
def test_a_part_that_is_only_out_of_reach_is_not_set_aside(runs, monkeypatch, error):
    def failing(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(damage.pq, "ParquetFile", failing)
        with pytest.raises(type(error)):
            LogWriter(runs / BAD / "log", run_info(BAD))
    assert srl.store.reading([runs / BAD], steps, warn=pytest.fail) == [1, 2, 3]


def test_a_damaged_file_of_watches_does_not_hide_the_log(tmp_path):
    log = new_log(tmp_path)
    write_step(log, 1)
    log.write_watches([{"step": 1, "phase": "train", "watch": "length_high", "metric": "m", "value": 2.0}])
    file = tmp_path / "log" / "watches.parquet"
    file.write_bytes(file.read_bytes()[:-20])
    warned: list[str] = []
    with srl.store.open(tmp_path, warn=warned.append) as connection:
        assert steps(connection) == [1]
        assert connection.execute("SELECT count(*) FROM watches").fetchall() == [(0,)]
    (said,) = warned
    assert "left out: which watches fired" in said
