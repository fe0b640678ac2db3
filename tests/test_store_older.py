"""Logs of earlier versions open, go on, are compacted and finished; so do those with columns of a newer one.

In the first, `searches` did not say which retriever was asked; up to the second, the log did not say which
hits were shown, how long an episode took, nor the trainer's log-probs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
from tests.store_builder import BERN, KLEE, episode, new_log, record, search, write_step

import srl.store
from srl.cli import main
from srl.evaluate import EpisodeResult, read_results
from srl.store import finished as finished_log
from srl.store import records, writer
from srl.store.merge import merge_logs
from srl.store.schema import PARTS

Version = Callable[[], AbstractContextManager[None]]


NOT_YET = {
    "shown": "", "cut": "", "seconds": "", "cover_em": "", "trainer_logprobs": "", "entropies": "",
    "returned": "", "gold_rank": "", "judged": "", "repeated": "",
}  # fmt: skip


@contextmanager
def written_with(columns: dict[str, str]) -> Iterator[None]:
    """The log is written as by a version with these names of the columns, "" for one that it lacked."""
    table = records._table

    def older(schema):
        fields = [(columns.get(field.name, field.name), field) for field in schema]
        return pa.schema([field.with_name(name) for name, field in fields if name])

    def table_of(found, schema):
        return table([row | {old: row.get(new) for new, old in columns.items()} for row in found], schema)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("searches", "trajectories", "segments"):
            patch.setitem(PARTS, name, older(PARTS[name]))
        patch.setattr(records, "_table", table_of)
        patch.setattr(finished_log, "create_views", lambda *_: None)
        yield


def write_asking_web(log: srl.store.LogWriter, step: int) -> None:
    """A step of one episode that asked the retriever `web`."""
    asked = episode(step=step)
    asked.searches = [replace(search, retriever="web") for search in asked.searches]
    log.write(step, "train", [record(asked)], {})


def retrievers(run: Path) -> list[tuple[int, str]]:
    with srl.store.open(run) as connection:
        return connection.execute("SELECT step, retriever FROM searches ORDER BY ALL").fetchall()


@pytest.fixture(params=[("", ""), ("retriever", "web")], ids=["no column", "not shown"])
def older(request) -> tuple[Version, str]:
    """An earlier version, and which retriever its logs say was asked."""
    column, asked = request.param
    return lambda: written_with({"retriever": column, **NOT_YET}), asked


@pytest.mark.parametrize("finished", [False, True])
def test_an_older_log_opens_and_says_which_retriever_was_asked(tmp_path, older, finished):
    version, asked = older
    with version():
        log = new_log(tmp_path)
        write_asking_web(log, 1)
        if finished:
            log.finish()
    assert retrievers(tmp_path) == [(1, asked)]
    with srl.store.open(tmp_path) as connection:
        (found,) = srl.store.read_records(connection)
    assert found.trajectory.searches == [replace(episode().searches[0], retriever=asked)]


@pytest.mark.parametrize("finished", [False, True])
def test_an_older_log_goes_on_and_is_finished(tmp_path, older, finished):
    version, asked = older
    with version():
        log = new_log(tmp_path)
        write_asking_web(log, 1)
        if finished:
            log.finish()
    log = new_log(tmp_path)
    write_asking_web(log, 2)
    expected = [(1, asked), (2, "web")]
    assert retrievers(tmp_path) == expected
    log.finish()
    assert retrievers(tmp_path) == expected


def test_parts_of_two_versions_become_one(tmp_path, older, monkeypatch):
    monkeypatch.setattr(writer, "COMPACT_AT", 2)
    version, asked = older
    with version():
        write_asking_web(new_log(tmp_path), 1)
    write_asking_web(new_log(tmp_path), 2)
    assert len(list((tmp_path / "log" / "parts").glob("steps-*"))) == 1
    assert retrievers(tmp_path) == [(1, asked), (2, "web")]


def test_logs_of_two_versions_are_read_together(tmp_path, older):
    version, asked = older
    with version():
        for name, ends in (("running", False), ("finished", True)):
            log = new_log(tmp_path / name)
            write_asking_web(log, 1)
            if ends:
                log.finish()
    write_asking_web(new_log(tmp_path / "today"), 1)
    with srl.store.open(tmp_path) as connection:
        found = connection.execute("SELECT run_id, retriever, query FROM searches ORDER BY ALL").fetchall()
    assert found == [
        ("finished", asked, "painter 0"),
        ("running", asked, "painter 0"),
        ("today", "web", "painter 0"),
    ]


@pytest.mark.parametrize("finished", [False, True])
def test_an_older_log_does_not_say_what_was_shown_and_its_results_are_read(tmp_path, finished):
    with written_with(NOT_YET):
        log = new_log(tmp_path)
        log.write(0, "eval", [record(episode(step=0, phase="eval", answer="in Bern"))], {})
        if finished:
            log.finish()
    with srl.store.open(tmp_path) as connection:
        hits = connection.execute("SELECT shown, has_answer FROM hits ORDER BY rank").fetchall()
        ranks = connection.execute("SELECT gold_rank FROM searches").fetchall()
        more = connection.execute(
            "SELECT cover_em, seconds, gold_in_passages, verdict FROM trajectories"
        ).fetchall()
        tokens = connection.execute(
            "SELECT DISTINCT trainer_logprobs, entropies, len(logprobs) > 0 FROM segments WHERE mask = 1"
        ).fetchall()
        (found,) = read_results(connection)
    assert (hits, ranks) == ([(None, True), (None, False)], [(1,)])
    assert more == [(None, None, True, "reader")]
    assert tokens == [(None, None, True)]
    assert found == EpisodeResult.of(episode(step=0, phase="eval", answer="in Bern"))
    assert (found.answer_shown, found.seconds) == (True, None)


@pytest.mark.parametrize("finished", [False, True])
def test_searches_of_an_older_log_are_counted_from_their_passages(tmp_path, finished):
    asking = episode()
    asking.searches = [search("Klee", BERN, KLEE), search(" klee ", BERN, turn=1), search("x", turn=2)]
    with written_with(NOT_YET):
        log = new_log(tmp_path)
        log.write(1, "train", [record(asking)], {})
    log.write(2, "train", [record(episode(step=2))], {})
    if finished:
        log.finish()
    query = "SELECT step, hits, gold_rank, judged, repeated FROM searches ORDER BY step, position"
    with srl.store.open(tmp_path) as connection:
        found = connection.execute(query).fetchall()
    assert found == [
        (1, 2, 2, None, False), (1, 1, None, None, True), (1, 0, None, None, False), (2, 2, 1, True, False)
    ]  # fmt: skip


@pytest.mark.parametrize("finished", [False, True])
def test_columns_of_a_newer_version_are_left_out(tmp_path, monkeypatch, finished):
    with monkeypatch.context() as patch:
        for table in PARTS:
            patch.setitem(PARTS, table, PARTS[table].append(pa.field("mood", pa.string())))
        log = new_log(tmp_path / "run")
        write_step(log, 1)
        if finished:
            log.finish()
        else:
            log.close("interrupted")
    with srl.store.open(tmp_path / "run") as connection:
        assert connection.execute("SELECT count(*), count(DISTINCT id) FROM trajectories").fetchall() == [
            (2, 2)
        ]
        with pytest.raises(duckdb.BinderException, match="mood"):
            connection.execute("SELECT mood FROM trajectories")
    log = new_log(tmp_path / "run")
    write_step(log, 2)
    log.finish()
    with srl.store.open(tmp_path / "run") as connection:
        assert connection.execute("SELECT count(*) FROM segments").fetchall() == [(16,)]
    merge_logs([tmp_path / "run"], tmp_path / "merged")


@pytest.mark.parametrize(
    "typed", [["sizes", "last"], ["prune", "last", "--steps", "1"], ["merge"], ["trajectories", "last"]]
)
def test_a_log_of_a_newer_format_is_one_line_for_every_command(workspace, tmp_path, capsys, typed):
    run = workspace / "runs" / "20250102T030405Z-tiny-grpo-s1-00aa"
    log = new_log(run)
    write_step(log, 1)
    log.finish()
    manifest = run / "log" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 9'))
    more = [str(run), "-o", str(tmp_path / "out")] if typed == ["merge"] else []
    assert main(["inspect", *typed, *more]) == 2
    err = capsys.readouterr().err
    assert "format 9" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
