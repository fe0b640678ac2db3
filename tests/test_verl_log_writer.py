"""The one writer of a run on verl: what it is handed is in the log once, whatever happens next."""

import errno
import os
from pathlib import Path

import pytest
from tests.store_builder import episode, log_records, log_rows, record, run_info

from srl import files
from srl.config import load_config
from srl.errors import UserError
from srl.train.run_directory import Progress
from srl.train.verl.log_writer import LogActor
from srl.train.watches import Watcher


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / run_info().run_id / "log"


def new_writer(log: Path, after: int | None = None) -> LogActor:
    return LogActor(log, run_info(), resumed_from=after)


def entries(log: Path) -> list[tuple]:
    """Every entry of the log with the number of episodes it says it has."""
    return log_rows(log, "SELECT phase, step, trajectories FROM steps ORDER BY step, phase")


def counts(log: Path) -> list[tuple]:
    """How many episodes there are of each step."""
    return log_rows(log, "SELECT phase, step, count(*) FROM trajectories GROUP BY ALL ORDER BY step, phase")


def add(to: LogActor, step: int, phase: str = "train", count: int = 2, **given) -> None:
    for number in range(count):
        to.add(step, phase, record(episode(number, step=step, phase=phase, **given), advantage=None))


def finish(to: LogActor, *given: object) -> None:
    """A step finished, and in the log."""
    to.finish(*given)
    to.flush()


def test_episodes_are_in_the_order_of_question_and_sample(log):
    writer = new_writer(log)
    for number, sample in ((1, 1), (0, 1), (1, 0), (0, 0)):
        writer.add(1, "train", record(episode(number, sample=sample)))
    finish(writer, 1, "train", {"timing_s/step": 2.0})
    found = log_rows(log, "SELECT question_id, sample FROM trajectories ORDER BY position")
    assert found == [("nq-0", 0), ("nq-0", 1), ("nq-1", 0), ("nq-1", 1)]


def test_the_numbers_of_tokens_end_up_at_their_tokens(log):
    writer = new_writer(log)
    trajectory = episode(0)
    writer.add(1, "train", record(trajectory, advantage=None))
    add(writer, 2, count=1)
    prompt = len(trajectory.segments[0].token_ids)
    response = [float(number) for number in range(1, len(trajectory.token_ids) - prompt + 1)]
    factors = {"advantages": 1.0, "returns": -1.0, "trainer_logprobs": -1 / 8, "entropies": 1 / 4}
    given = {name: [value * factor for value in response] for name, factor in factors.items()}
    finish(writer, 1, "train", {}, {trajectory.id: given})
    finish(writer, 2, "train", {}, {"another": {"advantages": [1.0]}})
    assert log_rows(
        log, "SELECT DISTINCT advantages IS NULL AND entropies IS NULL FROM segments WHERE step = 2"
    ) == [(True,)]
    (found,) = log_records(log, "step = ?", [1])
    policy = trajectory.response_mask[prompt:]
    assert sum(policy) not in (0, len(policy)), "there are tokens of both kinds after the prompt"
    expected = [value * bit for value, bit in zip(response, policy, strict=True)]
    for name, factor in factors.items():
        assert list(getattr(found, name)) == [0.0] * prompt + [value * factor for value in expected]


def test_a_run_that_fails_leaves_the_episodes_of_its_unfinished_step(log):
    writer = new_writer(log)
    add(writer, 1)
    finish(writer, 1, "train", {"actor/lr": 1.0})
    add(writer, 2, count=1)
    add(writer, 1, "val", count=3)
    writer.close("failed")
    assert entries(log) == [("train", 1, 2), ("train", 2, 1)], "an unfinished validation has measured nothing"
    assert log_rows(log, "SELECT status FROM runs") == [("failed",)]


def watched(log: Path, action: str, after: int | None = None) -> LogActor:
    config = load_config("tiny", None, "grpo", sets=[f"watch.action={action}"]).config
    return LogActor(log, run_info(), watcher=Watcher(config), resumed_from=after)


def test_a_watch_that_fires_is_said_and_logged_and_known_to_a_resumed_run(log):
    writer = watched(log, "note")
    for step in (1, 2, 3):
        add(writer, step)
        finish(writer, step, "train", {"actor/ref_kl": 5.0})
    assert (len(writer.poll().notes), writer.failure()) == (1, None)
    assert log_rows(log, "SELECT step, watch, value, action FROM watches") == [(3, "kl", 5.0, "note")]
    resumed = watched(log, "note", after=3)
    add(resumed, 4)
    finish(resumed, 4, "train", {"actor/ref_kl": 5.0})
    assert resumed.poll().notes == [], "it does not fire twice"
    assert log_rows(log, "SELECT step FROM watches") == [(3,)]
    watched(log, "note", after=2)
    assert log_rows(log, "SELECT * FROM watches") == [], "the step in which it fired is made again"


def test_a_watch_that_stops_a_run_ends_it_as_a_failure(log):
    writer = watched(log, "stop")
    for step in (1, 2, 3):
        add(writer, step)
        writer.finish(step, "train", {"actor/ref_kl": 5.0})
    assert isinstance(writer.failure(), UserError)
    assert ("train", 2, 2) in entries(log)
    with pytest.raises(UserError):
        writer.flush()


def test_a_finished_step_is_told_with_what_its_episodes_say_of_it(log):
    writer = new_writer(log)
    add(writer, 1)
    known = writer.finish(1, "train", {"actor/lr": 0.5, "train/em": 9.0})
    assert known["actor/lr"] == 0.5
    assert known["train/em"] == 0.0, "what the episodes say comes before what verl says of them"
    (event,) = writer.poll().events
    assert event.metrics == known
    writer.flush()
    assert dict(log_rows(log, "SELECT name, value FROM metrics")) == known


def test_a_resumed_runs_figures_are_those_of_its_log(log):
    stopped = new_writer(log)
    for step, phase, answer in ((0, "val", "x"), (0, "test", "x"), (1, "train", "x"), (1, "val", None)):
        told = episode(0, step=step, phase=phase, answer=answer and "Münchenbuchsee")
        stopped.add(step, phase, record(told, advantage=None))
        finish(stopped, step, phase, {"timing_s/step": 3.0} if phase == "train" else {})
    add(stopped, 2, count=1)
    stopped.close("failed")
    resumed = new_writer(log, after=1)
    assert resumed.progress == Progress(1, 3.0, {0: 1.0, 1: 0.0}, {0: 1.0})


def test_a_full_disk_is_the_runs_failure_and_what_was_written_stays(log, monkeypatch):
    writer = new_writer(log)
    add(writer, 1)
    finish(writer, 1, "train", {})
    add(writer, 2)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", full)
        writer.finish(2, "train", {})
        add(writer, 3)
        writer.finish(3, "train", {})
        assert isinstance(writer.failure(), UserError)
        assert writer.poll().failure is writer.failure()
        with pytest.raises(UserError):
            writer.flush()
        with pytest.raises(UserError):
            writer.close("failed")
    resumed = new_writer(log, after=1)
    add(resumed, 2)
    finish(resumed, 2, "train", {})
    resumed.close("finished")
    assert entries(log) == counts(log) == [("train", 1, 2), ("train", 2, 2)]


def test_a_trainer_that_goes_on_after_the_end_gets_no_further(log):
    """What is interrupted is still at work when the log is closed; it must not call its step saved."""
    writer = new_writer(log)
    add(writer, 1, count=1)
    writer.close("interrupted")
    add(writer, 1, count=4)
    writer.finish(1, "train", {})
    with pytest.raises(UserError):
        writer.flush()
    assert entries(log) == counts(log) == [("train", 1, 1)]


def test_a_step_that_cannot_be_measured_is_the_runs_failure(log, monkeypatch):
    writer = new_writer(log)
    add(writer, 1)
    monkeypatch.setattr("srl.train.verl.log_writer.measured", lambda records, phase: 1 / 0)
    writer.finish(1, "train", {})
    assert isinstance(writer.failure(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        writer.flush()
