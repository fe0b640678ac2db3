"""Following a run on verl to its end, and the error that it ends with; Ray is faked."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tests.store_builder import episode, record, run_info

from srl.config import Config
from srl.errors import CheckFailed, SrlError, UserError, with_notes
from srl.rollout.delivery import NotDelivered
from srl.store import reading
from srl.train.report import Terminal
from srl.train.resume import resume_with
from srl.train.verl.follow import follow
from srl.train.verl.log_writer import LogActor

pytest.importorskip("ray")
import ray
from ray.core.generated.common_pb2 import ActorDeathCause
from ray.exceptions import ActorDiedError, GetTimeoutError, OutOfMemoryError, RayTaskError

from srl.train.verl import failures

pytestmark = [pytest.mark.slow, pytest.mark.must_run]  # they need Ray, which comes with verl

FOLDER = Path("srl-workspace") / "runs" / "20250102T030405Z-tiny-grpo-s1-00aa"


def remote(error: BaseException, times: int = 1) -> BaseException:
    """The error as Ray raises it here, after so many processes passed it on."""
    for _ in range(times):
        trace = f"\x1b[36mray::Runner.run()\x1b[39m (pid=1)\n  File x\n{type(error).__name__}: {error}"
        wrapped = RayTaskError("run", trace, error, proctitle="ray::Runner.run", pid=1, ip="127.0.0.1")
        error = wrapped.as_instanceof_cause()
    return error


class Followed:
    """A run: its log, its terminal, Ray's table of dead processes. The training acts at each look, and ends
    with an error or well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = LogActor(FOLDER / "log", run_info())
        self.out, self.steps_told = io.StringIO(), list[int]()
        self.config = Config.model_validate({"cluster": {"watchdog_s": 5.0}})
        self.acts, self.end = list[Callable[[], object]](), None
        self.dead: dict[str, Any] = {}
        monkeypatch.setattr(ray, "get", lambda call, timeout=None: call())
        monkeypatch.setattr(ray, "wait", self.wait)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "job"))
        monkeypatch.setattr(failures, "actors", lambda actor_state_name: self.dead)

    def __getattr__(self, name: str) -> Any:
        """A method of the log actor, as Ray hands it out."""
        return SimpleNamespace(remote=lambda *arguments: lambda: getattr(self.log, name)(*arguments))

    def wait(self, calls: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        if not self.acts:
            return calls, []
        self.acts.pop(0)()
        return [], calls

    def dies(self, name: str, job: str = "job", **cause: Any) -> Callable[[], None]:
        def act() -> None:
            self.dead["0123"] = {
                "ActorClassName": name, "Pid": 77, "Address": {"IPAddress": "10.0.0.3"}, "JobID": job,
                "DeathCause": ActorDeathCause(**cause),
            }  # fmt: skip

        return act

    def metrics(self, step: int, values: object) -> None:
        self.steps_told.append(step)

    def follow(self, *acts: Callable[[], object], end: BaseException | None = None) -> Any:
        def training() -> None:
            if end is not None:
                raise end

        self.acts = list(acts)
        terminal = Terminal(Console(file=self.out, width=200, soft_wrap=True))
        logger: Any = SimpleNamespace(metrics=self.metrics)
        return follow(training, self, FOLDER, self.config, terminal, [logger])

    def ends_with(self, kind: type[BaseException], *acts: Any, end: BaseException | None = None) -> Any:
        with pytest.raises(kind) as error:
            self.follow(*acts, end=end)
        assert "\x1b" not in str(error.value)
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
    return Followed(monkeypatch)


@pytest.fixture
def resumes(run) -> str:
    return resume_with(FOLDER)


def test_steps_are_told_as_they_come_and_the_log_is_finished(run):
    progress = run.follow(run.step(1), run.step(2))
    assert (progress.step, progress.seconds, run.status()) == (2, 4.0, "finished")
    assert run.steps_told == [1, 2]
    assert len(run.out.getvalue().splitlines()) == 2


@pytest.mark.parametrize("times", [0, 1, 3])
@pytest.mark.parametrize("kind", [UserError, CheckFailed])
def test_an_error_of_ours_arrives_whole_from_any_process_after_what_happened_before(run, kind, times):
    error = kind("search failed", key="search.url", hint="mend it")
    error.add_note("while scoring")
    end = run.ends_with(kind, run.step(1), run.step(2), end=remote(error, times))
    assert (type(end), str(end), end.key, end.__notes__) == (kind, str(error), "search.url", error.__notes__)
    assert (run.steps_told, run.status()) == ([1, 2], "failed")


WORKER_DIED = {"actor_died_error_context": {"reason": "WORKER_DIED"}}


@pytest.mark.parametrize(("job", "cause", "ends"), [
    ("job", WORKER_DIED, True),
    ("job", {"oom_context": {}}, True),
    ("another", WORKER_DIED, False),
    ("job", {"actor_died_error_context": {"reason": "RAY_KILL"}}, False),
])  # fmt: skip
def test_a_process_that_died_ends_the_run_and_is_named_with_number_and_machine(
    run, resumes, job, cause, ends
):
    acts = [run.step(1), run.dies("create.<locals>.WorkerDict", job, **cause), run.step(2)]
    if not ends:
        assert run.follow(*acts).step == 2
        return
    end = run.ends_with(UserError, *acts)
    assert all(part in str(end) for part in ("WorkerDict", "process 77 on 10.0.0.3", resumes))
    assert run.status() == "failed"


def test_what_broke_an_episode_ends_the_run_and_comes_before_what_verl_made_of_it(run):
    failure = UserError("a server died")
    run.log.fail(failure)
    run.log.fail(UserError("another"))
    assert run.ends_with(UserError, end=remote(RuntimeError("no trajectories"))) is failure
    assert run.ends_with(UserError, bool, bool) is failure


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("\x1b[31mTask was killed\x1b[0m\nmore\nlines"),
        NotDelivered("the engine holds others"),
        ActorDiedError(),
    ],
    ids=["memory", "weights", "unknown actor"],
)
def test_faults_of_the_machines_say_how_to_resume(run, resumes, error):
    assert resumes in with_notes(run.ends_with(SrlError, end=remote(error, 2)))


def test_a_bug_is_raised_as_itself_with_the_other_processs_traceback(run):
    end = run.ends_with(KeyError, end=remote(KeyError("uid"), 2))
    assert type(end) is KeyError
    assert "Runner.run()" in str(end.__cause__)
    assert run.status() == "failed"


def test_an_interruption_is_in_the_log(run):
    def interrupted() -> None:
        raise KeyboardInterrupt

    run.ends_with(KeyboardInterrupt, run.step(1), interrupted)
    assert run.status() == "interrupted"


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass with each look."""
    moments = SimpleNamespace(now=time.monotonic(), each=0.0)

    def monotonic() -> float:
        moments.now += moments.each
        return moments.now

    monkeypatch.setattr("srl.train.verl.log_writer.time.monotonic", monotonic)
    return moments


def test_a_run_that_stands_is_ended_with_its_stage(run, clock, resumes):
    run.step(2)()
    clock.each = 1.0
    run.log.mark("sending the weights", 3)
    end = run.ends_with(UserError, *[bool] * 100)
    assert end.key == "cluster.watchdog_s"
    assert all(part in str(end) for part in ("sending the weights of step 3", resumes))
    assert run.status() == "failed"


def test_a_run_that_goes_forward_slowly_is_left_alone(run, clock):
    def slowly() -> None:
        clock.now += 4.9
        run.log.mark("rollout", 1)

    run.follow(*[slowly] * 20)
    assert run.status() == "finished"


def test_a_log_writer_that_does_not_answer_ends_the_run(run, resumes, monkeypatch):
    def get(call: object, timeout: float) -> None:
        raise GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)
    assert resumes in str(run.ends_with(UserError, bool))
