"""`srl eval rescore`: another measure of stored answers, in a table of its own; the log stays as it is."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from tests.store_builder import episode, record, search

import srl.store
from srl.answers import f1
from srl.cli import main
from srl.config import load_config, save_config
from srl.evaluate.rescore import rescore
from srl.store import LogWriter, RunInfo, read_records
from srl.store.rescores import rescore_files

NAME = "20260101T000000Z-test-grpo-s0-00ff"
ANSWERS = ["Münchenbuchsee", "Bern", "in Münchenbuchsee", None]
REWARDS = '''
from srl.trajectory import Score

class Down:
    """Cannot score one episode."""
    def score(self, trajectories):
        return [Score(1.0, error="it is down" * (item.question.id == "nq-5")) for item in trajectories]

class Fussy:
    """Fails on one episode late in the log."""
    def score(self, trajectories):
        return [Score(1.0 / (item.question.id != "nq-5")) for item in trajectories]
'''


def episodes(step: int, phase: str, count: int = 6):
    """Episodes with right, wrong, half-right and missing answers; the last one failed."""
    found = [episode(number, step=step, phase=phase, answer=ANSWERS[number % 4]) for number in range(count)]
    broken = episode(count, step=step, phase=phase, answer=None, end="failed")
    broken.searches[-1] = search("query", status="refused", error="nobody listens")
    return [*found, broken]


@pytest.fixture
def run(workspace: Path) -> Path:
    """A run of training with two steps, validations, and an interrupted log."""
    return made(workspace / "runs" / NAME)


def made(run: Path, *, finish: bool = False, **settings: object) -> Path:
    run.mkdir(parents=True)
    save_config(run, load_config(None, None, "grpo", settings).config)
    log = LogWriter(run / "log", RunInfo(run.name))
    for step, phase in ((0, "val"), (1, "train"), (2, "train"), (2, "val")):
        log.write(step, phase, [record(item, advantage=None) for item in episodes(step, phase)], {})
    log.finish() if finish else log.close("interrupted")
    return run


def asked(run: Path, query: str) -> list[tuple]:
    with srl.store.open(run) as log:
        return log.execute(query).fetchall()


def content(run: Path) -> dict[str, str]:
    """A digest of every file of the run but for the rescores."""
    files = (file for file in sorted(run.rglob("*")) if file.is_file() and "rescores" not in file.parts)
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("finish", [False, True])
def test_the_new_measure_is_that_of_the_stored_answers_and_the_log_is_unchanged(
    workspace, monkeypatch, finish
):
    monkeypatch.setattr("srl.store.batches.SIZE", 3)
    run = made(workspace / "runs" / NAME, finish=finish)
    before = content(run)
    found = rescore(run, ["f1"])
    assert (found.scored, found.before, found.rewards) == (28, 0, "f1")
    assert content(run) == before
    stored = dict(asked(run, "SELECT trajectory_id, value FROM rescores WHERE measure = 'f1'"))
    with srl.store.open(run) as log:
        expected = {
            item.trajectory.id: f1(item.trajectory.answer, item.trajectory.question.golden_answers)
            for item in read_records(log)
        }
    assert stored == expected
    assert len(set(stored.values())) == 3, "right, half right, wrong"
    last = next(row for row in found.rows if (row.phase, row.step) == ("val", 2))
    assert last.episodes == 7
    assert last.em.mean == pytest.approx(2 / 7)
    assert last.measures["f1"].mean == pytest.approx((2 + 2 / 3) / 7)
    assert [(row.phase, row.step) for row in found.rows] == [
        ("train", 1),
        ("train", 2),
        ("val", 0),
        ("val", 2),
    ]


def test_the_same_again_is_not_computed_twice(run, capsys):
    for scored, before in ((28, 0), (0, 28)):
        assert main(["eval", "rescore", "last", "--reward", "f1", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["scored"], told["before"]) == (scored, before)
    assert asked(run, "SELECT count(*) FROM rescores WHERE measure = 'f1'") == [(28,)]
    assert len(rescore_files(run / "log")) == 1
    assert main(["eval", "rescore", "last", "--reward", "f1"]) == 0
    head = capsys.readouterr().out.splitlines()[0]
    assert head.split()[:3] == ["phase", "step", "episodes"]


@pytest.fixture
def own_rewards(tmp_path, monkeypatch):
    (tmp_path / "rescore_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        ("rescore_rewards:Fussy", "ZeroDivisionError"),
        ("rescore_rewards:Down", "it is down"),
        ("nope", "'nope'"),
    ],
)
def test_a_reward_that_fails_is_one_line_and_leaves_nothing_half(
    run, own_rewards, capsys, monkeypatch, reward, named
):
    monkeypatch.setattr("srl.store.batches.SIZE", 2)
    before = content(run)
    assert main(["eval", "rescore", "last", "--reward", reward]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert printed.out == ""
    assert not (run / "log" / "rescores").exists()
    assert content(run) == before


def test_steps_that_a_resumed_run_samples_again_lose_their_rescores(run):
    rescore(run, ["f1"])
    log = LogWriter(run / "log", RunInfo(run.name))
    log.drop_steps_after(1)
    assert asked(run, "SELECT DISTINCT phase, step FROM rescores ORDER BY step") == [("val", 0), ("train", 1)]
    again = episode(0, step=1, answer="Münchenbuchsee")
    log.write(1, "train", [record(again, advantage=None)], {})
    assert asked(run, "SELECT DISTINCT phase, step FROM rescores") == [("val", 0)]
    assert rescore(run, ["f1"]).scored == 1
    assert asked(run, "SELECT value FROM rescores WHERE phase = 'train' AND measure = 'f1'") == [(1.0,)]
