"""Following a run on verl to its end, and the error that it ends with; Ray is faked."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.store_builder import episode, record, run_info

from srl.config import Config
from srl.errors import CheckFailed, SrlError, UserError
from srl.rollout.delivery import NotDelivered
from srl.store import reading
from srl.train.report import Terminal
from srl.train.resume import resume_with
from srl.train.verl import follow as following
from srl.train.verl.log_writer import LogActor

pytest.importorskip("ray")
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayTaskError,
)

from srl.train.verl import failures
from srl.train.verl.failures import failed_episode
from srl.train.verl.workers import Health, difference

pytestmark = [pytest.mark.slow, pytest.mark.must_run]  # they need Ray, which comes with verl

FOLDER = Path("srl-workspace") / "runs" / "20250102T030405Z-tiny-grpo-s1-00aa"


def remote(error: BaseException, times: int = 1) -> BaseException:
    """The error as Ray raises it here, after so many processes passed it on."""
    for _ in range(times):
        trace = f"\x1b[36mray::Runner.run()\x1b[39m (pid=1)\n  File x\n{type(error).__name__}: {error}"
        wrapped = RayTaskError("run", trace, error, proctitle="ray::Runner.run", pid=1, ip="127.0.0.1")
        error = wrapped.as_instanceof_cause()
    return error


def died(monkeypatch: pytest.MonkeyPatch, class_name: str) -> BaseException:
    """The death of an actor of which Ray's table knows the rest."""
    known = {"ActorClassName": class_name, "Pid": 77, "Address": {"IPAddress": "10.0.0.3"}}
    monkeypatch.setattr(failures, "actors", lambda actor: known if actor == "0123" else {})
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    error = ActorDiedError()
    error.actor_id = "0123"
    return error


class Trainer:
    """A training that acts at each look, and ends with `end`, or stands still for ever."""

    def __init__(self, *acts: Callable[[], object], end: BaseException | None = None) -> None:
        self.acts, self.end = list(acts), end

    def done(self, timeout_s: float) -> bool:
        if not self.acts:
            return True
        self.acts.pop(0)()
        return False

    @classmethod
    def standing(cls) -> Trainer:
        return cls(*[bool] * 100)

    def outcome(self) -> None:
        if self.end is not None:
            raise self.end


class Followed:
    """A log, a terminal and a run's directory."""

    def __init__(self) -> None:
        self.log = LogActor(FOLDER / "log", run_info(), sample_freq=1)
        self.out, self.told = io.StringIO(), list[int]()
        self.config = Config.model_validate({"cluster": {"watchdog_s": 5.0}})

    def ask(self, name: str, *arguments: Any) -> Any:
        return getattr(self.log, name)(*arguments)

    def metrics(self, step: int, values: object) -> None:
        self.told.append(step)

    def close(self) -> None: ...

    def follow(self, training: Any, log: Any = None) -> Any:
        terminal = Terminal(Console(file=self.out, width=200, soft_wrap=True))
        return following.follow(training, log or self, FOLDER, self.config, terminal, [self])

    def ends_with(self, training: Any, kind: type[BaseException] = UserError, log: Any = None) -> Any:
        with pytest.raises(kind) as error:
            self.follow(training, log)
        assert "\n" not in str(error.value)
        return error.value

    def step(self, step: int) -> Callable[[], None]:
        def act() -> None:
            self.log.add(step, "train", record(episode(0, step=step), advantage=None))
            self.log.finish(step, "train", {"timing_s/step": 2.0})

        return act

    def status(self) -> str:
        return reading([FOLDER], lambda log: log.execute("SELECT status FROM runs").fetchone())[0]


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Followed()


@pytest.fixture
def resumes() -> str:
    return resume_with(FOLDER)


def test_steps_are_told_as_they_come_and_the_log_is_finished(run):
    progress = run.follow(Trainer(run.step(1), run.step(2)))
    assert (progress.step, progress.seconds, run.status(), run.told) == (2, 4.0, "finished", [1, 2])
    assert run.out.getvalue().count("gold: Münchenbuchsee") == 2, "an episode of each step is shown"


@pytest.mark.parametrize("times", [0, 1, 3])
def test_an_error_of_ours_arrives_whole_from_any_process_after_what_happened_before(run, times):
    error = UserError("search failed", key="search.url", hint="mend it")
    error.add_note("while scoring")
    end = run.ends_with(Trainer(run.step(1), run.step(2), end=remote(error, times)))
    assert (str(end), end.key, end.__notes__) == (str(error), "search.url", ["while scoring"])
    assert (run.told, run.status()) == ([1, 2], "failed")
    assert type(run.ends_with(Trainer(end=remote(CheckFailed("slow"), times)), CheckFailed)) is CheckFailed


@pytest.mark.parametrize("times", [0, 2])
def test_a_process_that_died_is_named_with_number_and_machine(run, monkeypatch, resumes, times):
    end = run.ends_with(Trainer(end=remote(died(monkeypatch, "create.<locals>.WorkerDict"), times)))
    assert all(part in str(end) for part in ("WorkerDict", "process 77 on 10.0.0.3", resumes))


def test_what_broke_an_episode_comes_before_what_verl_made_of_it(run, monkeypatch, resumes):
    failure = failed_episode(died(monkeypatch, "TorchServer"), FOLDER)
    run.log.fail(failure)
    run.log.fail(UserError("another"))
    assert run.ends_with(Trainer(end=remote(RuntimeError("no trajectories")))) is failure
    assert resumes in str(failure)
    bug = failed_episode(remote(KeyError("x")), FOLDER)
    assert type(bug) is UserError
    assert resumes in str(bug)


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device"),
        OutOfMemoryError("\x1b[31mTask was killed\x1b[0m\nmore\nlines"),
        NotDelivered("the engine holds others"),
        ActorDiedError(),
    ],
    ids=["disk", "checkpoint", "memory", "weights", "unknown actor"],
)
def test_faults_of_the_machines_say_how_to_resume(run, resumes, error):
    end = run.ends_with(Trainer(end=remote(error, 2)), SrlError)
    assert resumes in str(end)
    assert "\x1b" not in str(end)


def test_a_bug_is_raised_as_itself_with_the_other_processs_traceback(run):
    end = run.ends_with(Trainer(end=remote(KeyError("uid"), 2)), KeyError)
    assert type(end) is KeyError
    assert "ray::Runner.run() (pid=1)" in str(end.__cause__), "without its colours"
    assert run.status() == "failed"


def test_an_interruption_is_in_the_log(run):
    def interrupted() -> None:
        raise KeyboardInterrupt

    run.ends_with(Trainer(run.step(1), interrupted), KeyboardInterrupt)
    assert run.status() == "interrupted"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each look."""

    class Clock:
        now, each = time.monotonic(), 0.0

        def __call__(self) -> float:
            self.now += self.each
            return self.now

    made = Clock()
    monkeypatch.setattr("srl.train.verl.log_writer.time.monotonic", made)
    return made


def test_a_run_that_stands_is_ended_with_its_stage_and_what_it_knows(run, clock, resumes):
    run.step(2)()
    clock.each = 1.0
    run.log.mark("sending the weights", 3)
    run.log.fail(UserError("an episode broke"))
    end = run.ends_with(Trainer.standing())
    assert end.key == "cluster.watchdog_s"
    assert all(part in str(end) for part in ("sending the weights of step 3", "an episode broke", resumes))
    assert run.status() == "failed"


@pytest.mark.parametrize(("waits", "before"), [(4.9, True), (800.0, False)], ids=["a step", "the start"])
def test_a_run_that_goes_forward_slowly_is_left_alone(run, clock, waits, before):
    """Until an episode has come all processes are still starting, which takes longer."""
    if before:
        run.step(1)()

    def slowly() -> None:
        clock.now += waits
        run.log.mark("rollout", 1)

    run.follow(Trainer(*[slowly] * 20))
    assert run.status() == "finished"


class Actor:
    """Takes any call, and counts them; `answer` is what Ray has for them: an error, True, or nothing yet."""

    def __init__(self, answer: object = None) -> None:
        self.calls, self.answer = 0, answer

    def __getattr__(self, name: str) -> Actor:
        return self

    def remote(self, *arguments: object) -> tuple[Actor, int]:
        self.calls += 1
        return self, self.calls


@pytest.fixture
def answers(monkeypatch):
    def get(call: Any, timeout: float | None = None) -> object:
        if isinstance(call[0].answer, BaseException):
            raise call[0].answer
        return call[0].answer

    def wait(calls: list[Any], num_returns: int, timeout: float) -> Any:
        assert timeout == 0, "nobody waits for a busy process"
        return [call for call in calls if call[0].answer], []

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)


def test_a_dead_process_is_found_and_a_busy_one_or_one_out_of_reach_is_not(answers, monkeypatch):
    """Each is asked at most once a second."""
    now = [0.0]
    monkeypatch.setattr("srl.train.verl.workers.time.monotonic", lambda: now[0])
    busy, idle, dead = Actor(), Actor(True), Actor()
    away = Actor(ActorUnavailableError("the network is down", None))
    health = Health([busy, idle, away, dead])
    for moment in range(100):
        now[0] = moment / 50
        health.check()
    assert busy.calls == dead.calls == 1, "one ping under way is enough"
    assert idle.calls == away.calls == 3, "a ping at the start, and one after each of two looks"
    now[0] += 1.0
    dead.answer = ActorDiedError()
    with pytest.raises(ActorDiedError):
        health.check()


def test_the_writers_faults_are_the_runs_and_it_is_waited_for_once(answers, monkeypatch, resumes):
    log = following.RayLog(Actor(remote(UserError("the disk is full", key="k"))), FOLDER, 1800.0)
    with pytest.raises(UserError) as error:
        log.ask("poll")
    assert error.value.key == "k"
    waits: list[float] = []

    def get(call: object, timeout: float) -> None:
        waits.append(timeout)
        raise GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)
    for name in ("poll", "close"):
        with pytest.raises(UserError) as error:
            log.ask(name)
        assert resumes in str(error.value)
    assert waits == [1800.0, following.POLL_S]


MINE = {"host": "node1", "Python": "3.11.7", "verl": "0.9.1", "patches": "one"}
THERE = {**MINE, "host": "node2"}


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (THERE, ""),
        ({**THERE, "verl": "0.9.0"}, "verl"),
        ({**THERE, "algorithm x": "x 1"}, "algorithm x"),
        ({**THERE, "error": "ImportError: no plugin"}, "no plugin"),
        ({}, "patches"),
    ],
)
def test_a_worker_differs_by_what_it_has_installed_and_registered(theirs, named):
    found = difference(theirs, MINE)
    assert bool(found) == bool(named)
    assert named in found
