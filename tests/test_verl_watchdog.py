"""Following a run on verl: what is told, what ends it and in which words; without Ray, by fakes."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.store_builder import episode, record, run_info

from srl import files
from srl.config import Config
from srl.errors import CheckFailed, UserError
from srl.store import reading
from srl.train.report import Terminal
from srl.train.run_directory import Progress
from srl.train.verl import watchdog
from srl.train.verl.failures import final_error, plain_line, ray_starts, reason, role
from srl.train.verl.log_writer import LogActor, RunStatus
from srl.train.verl.watchdog import ActorHealth, watch

pytest.importorskip("ray")
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayTaskError,
)

pytestmark = [pytest.mark.slow, pytest.mark.must_run]  # they need Ray, which comes with verl

RUN = "20250102T030405Z-tiny-grpo-s1-00aa"
FOLDER = Path("srl-workspace") / "runs" / RUN
GO_ON = f"resume with `srl train --resume --run {RUN}`"


class DiedError(ActorDiedError):
    """As Ray words the death of an actor that ran."""

    def __init__(self, class_name: str) -> None:
        super().__init__()
        self.error_msg = (
            f"The actor died unexpectedly before finishing this task.\n\tclass_name: {class_name}\n"
            "\tactor_id: 0123\n\tpid: 77\n\tname: srl_torch_server_0\n\tnamespace: x\n\tip: 10.0.0.3\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
        )


def remote(error: BaseException, times: int = 1) -> BaseException:
    """The error as Ray raises it here, after so many processes passed it on."""
    for _ in range(times):
        trace = f"\x1b[36mray::Runner.run()\x1b[39m (pid=1)\n  File x\n{type(error).__name__}: {error}"
        wrapped = RayTaskError("run", trace, error, proctitle="ray::Runner.run", pid=1, ip="127.0.0.1")
        error = wrapped.as_instanceof_cause()
    return error


class Trainer:
    """A training that does something with the station at each look, and ends with `end`."""

    def __init__(self, *acts: Callable[[], object], end: BaseException | None = None) -> None:
        self.acts, self.end = list(acts), end

    def done(self, timeout_s: float) -> bool:
        if not self.acts:
            return True
        self.acts.pop(0)()
        return False

    def outcome(self) -> None:
        if self.end is not None:
            raise self.end


class Heard:
    """An external logger that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def metrics(self, step, values) -> None:
        self.told.append((step, dict(values)))

    def close(self) -> None: ...


class Fixture:
    """A station, a terminal and a run's directory."""

    def __init__(self) -> None:
        self.run = FOLDER
        self.station = LogActor(self.run / "log", run_info(), sample_freq=1, sample_count=1)
        self.out, self.heard = io.StringIO(), Heard()
        self.config = Config.model_validate({"cluster": {"watchdog_s": 5.0}})

    def follow(self, training: Trainer, station: object = None) -> Progress:
        terminal = Terminal(Console(file=self.out, width=200, soft_wrap=True))
        writer = station or self.station
        return watch(lambda: training, writer, self.run, self.config, terminal, [self.heard])

    def ended(self, training: Trainer, station: object = None) -> str:
        """The one line that the run ends with."""
        with pytest.raises(UserError) as error:
            self.follow(training, station)
        assert "\n" not in str(error.value)
        assert "\x1b" not in str(error.value)
        return str(error.value)

    def step(self, step: int) -> Callable[[], None]:
        def act() -> None:
            self.station.add(step, "train", record(episode(0, step=step), advantage=None))
            self.station.finish(step, "train", {"timing_s/step": 2.0})

        return act

    def status(self) -> str:
        return reading([self.run], lambda log: log.execute("SELECT status FROM runs").fetchone())[0]


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fixture:
    monkeypatch.chdir(tmp_path)
    return Fixture()


def test_steps_are_told_as_they_come_and_the_log_is_finished(setting):
    progress = setting.follow(Trainer(setting.step(1), setting.step(2)))
    assert (progress.step, progress.seconds, setting.status()) == (2, 4.0, "finished")
    assert [step for step, _ in setting.heard.told] == [1, 2]
    assert setting.heard.told[0][1]["train/em"] == 0.0
    said = setting.out.getvalue()
    total = setting.config.trainer.total_training_steps
    assert [said.count(f" {step}/{total} ") for step in (1, 2)] == [1, 1]
    assert said.count("gold: Münchenbuchsee") == 2, "an episode of each step is shown"


def test_what_happened_last_is_told_before_the_run_ends(setting):
    line = setting.ended(Trainer(setting.step(1), setting.step(2), end=remote(UserError("no more"))))
    assert line == "no more"
    assert [step for step, _ in setting.heard.told] == [1, 2]
    assert setting.status() == "failed"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_users_mistake_in_any_process_is_its_own_line(setting, times):
    assert setting.ended(Trainer(end=remote(UserError("search failed; mend it"), times))) == (
        "search failed; mend it"
    )


def test_a_failed_check_keeps_its_exit_code(setting):
    with pytest.raises(CheckFailed, match=r"^too slow$"):
        setting.follow(Trainer(end=remote(CheckFailed("too slow"), 2)))


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize(
    ("class_name", "what"),
    [
        ("TorchServerActor", "rollout server"),
        ("vLLMHttpServer", "rollout server"),
        ("AgentLoopWorkerTQ", "rollout worker"),
        ("create_colocated_worker_cls.<locals>.WorkerDict", "training worker"),
        ("Runner", "trainer"),
        ("LogActor", "log writer"),
        ("SimpleStorageUnit", "TransferQueue storage"),
        ("Something", "process Something"),
    ],
)
def test_a_process_that_died_is_named_with_number_and_machine(setting, class_name, what, times):
    line = setting.ended(Trainer(end=remote(DiedError(class_name), times)))
    assert line == f"the {what} died (process 77 on 10.0.0.3); {GO_ON}"


def test_what_broke_an_episode_comes_before_what_verl_made_of_it(setting):
    setting.station.fail("the rollout server died (process 77 on 10.0.0.3)")
    line = setting.ended(Trainer(end=remote(RuntimeError("no materializable trajectories"))))
    assert line == f"the rollout server died (process 77 on 10.0.0.3); {GO_ON}"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: No space left on device"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_full_disk(setting, error):
    line = setting.ended(Trainer(end=remote(error, 2)))
    assert line.startswith("the disk is full: ")
    assert line.endswith(f"; free some space and {GO_ON}")


def test_a_write_that_failed_where_there_is_no_room_is_a_full_disk(setting, monkeypatch):
    monkeypatch.setattr(files, "_has_room", lambda folder: False)
    line = setting.ended(Trainer(end=remote(RuntimeError("unexpected pos 64 vs 0"))))
    assert line.startswith("the disk is full: RuntimeError: unexpected pos 64 vs 0; free some space")


def test_memory_that_ran_out_is_the_machines_fault(setting):
    line = setting.ended(Trainer(end=remote(OutOfMemoryError("\x1b[31mTask was killed\x1b[0m\nmore\nlines"))))
    assert line == f"Task was killed; {GO_ON}"


def test_a_gpu_without_room_says_what_takes_less(setting):
    class OutOfMemoryError(RuntimeError):
        """As torch's."""

    line = setting.ended(Trainer(end=OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\n")))
    assert line.startswith(
        "GPU out of memory: CUDA out of memory. Tried to allocate 2 GiB; resume with `srl "
    )
    assert "and add a lower --set actor.ppo_max_token_len=N" in line
    assert "--set cluster.gpu_memory_utilization=" in line


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (UserError("the log is being written by process 7"), "the log is being written by process 7"),
        (ValueError("no"), f"a process of the run could not start: ValueError: no; {GO_ON}"),
    ],
)
def test_a_process_that_cannot_start_says_why(setting, raised, line):
    name = "srl.errors.UserError" if isinstance(raised, UserError) else type(raised).__name__
    trace = f"\x1b[36mray::LogActor.__init__()\x1b[39m (pid=1)\n  File x\n{name}: {raised}\n"
    error = RayTaskError("__init__", trace, raised, proctitle="ray::LogActor", pid=1, ip="127.0.0.1")
    assert setting.ended(Trainer(end=ActorDiedError(error))) == line


def test_a_bug_is_raised_as_itself_with_the_other_processs_traceback(setting):
    with pytest.raises(KeyError) as error:
        setting.follow(Trainer(end=remote(KeyError("uid"), 2)))
    assert type(error.value) is KeyError
    assert "ray::Runner.run() (pid=1)" in str(error.value.__cause__), "without its colours"
    assert setting.status() == "failed"


def test_an_interruption_is_in_the_log(setting):
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        setting.follow(Trainer(setting.step(1), interrupted))
    assert setting.status() == "interrupted"


def test_a_run_that_cannot_begin_closes_its_log(setting):
    def begin() -> None:
        raise UserError("no such cluster")

    with pytest.raises(UserError, match="no such cluster"):
        watch(begin, setting.station, setting.run, setting.config, Terminal(quiet=True), [])
    assert setting.status() == "failed"


class Standing(Trainer):
    """A training that never ends and never goes forward, until somebody has looked a hundred times."""

    def done(self, timeout_s: float) -> bool:
        self.looks = getattr(self, "looks", 0) + 1
        assert self.looks < 100, "nobody ends it"
        return False


class Clock:
    """Seconds that pass with each look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, each: float) -> None:
        self.now, self.each = time.monotonic(), each
        monkeypatch.setattr("srl.train.verl.log_writer.time.monotonic", self)

    def __call__(self) -> float:
        self.now += self.each
        return self.now


def test_a_transfer_of_weights_that_hangs_ends_the_run(setting, monkeypatch):
    setting.step(2)()
    Clock(monkeypatch, 1.0)
    setting.station.mark("sending the weights", 3)
    line = setting.ended(Standing())
    assert line == (
        f"no progress for 6 s (cluster.watchdog_s=5); last stage: sending the weights of step 3; {GO_ON}"
    )
    assert setting.status() == "failed"


def test_a_run_that_goes_forward_slowly_is_left_alone(setting, monkeypatch):
    setting.step(1)()
    clock = Clock(monkeypatch, 0.0)

    def slowly() -> None:
        clock.now += 4.9
        setting.station.mark("update of the policy", 1)

    setting.follow(Trainer(*[slowly] * 20))
    assert setting.status() == "finished"


def test_a_start_may_take_longer_than_a_step(setting, monkeypatch):
    """Until an episode has come: what was marked before is starting too."""
    clock = Clock(monkeypatch, 0.0)

    def start() -> None:
        clock.now += 800.0
        setting.station.mark("checking the workers", 0)

    setting.follow(Trainer(start, start, setting.step(1)))
    assert setting.status() == "finished"


def test_a_start_that_takes_forever_is_ended_too(setting, monkeypatch):
    Clock(monkeypatch, 20.0)
    assert "(cluster.watchdog_s=5); last stage: start-up; resume" in setting.ended(Standing())


def test_a_run_that_stands_says_what_it_knows(setting, monkeypatch):
    setting.step(1)()
    Clock(monkeypatch, 1.0)
    setting.station.mark("rollout", 2)
    setting.station.fail("an episode failed: ValueError: no")
    line = setting.ended(Standing())
    assert "last stage: rollout of step 2 (an episode failed: ValueError: no); resume" in line


@pytest.mark.parametrize(
    ("address", "what"),
    [(None, "Ray does not start on this machine"), ("node:6379", "no Ray cluster answers at node:6379")],
)
def test_a_ray_that_does_not_start_is_one_line(address, what):
    with (
        pytest.raises(UserError, match=f"^{what}: The current node timed out$"),
        ray_starts(address),
    ):
        raise RuntimeError("The current node timed out\nmore of it")


class Gone:
    """The writer of a log whose process has died."""

    def poll(self) -> RunStatus:
        raise UserError(f"the log writer died (process 5 on 127.0.0.1); {GO_ON}")

    def close(self, status: str, error: str = "") -> Progress:
        raise UserError("nobody answers")


def test_a_run_whose_log_has_no_writer_ends_with_that(setting):
    assert setting.ended(Standing(), Gone()) == f"the log writer died (process 5 on 127.0.0.1); {GO_ON}"


def test_a_log_that_cannot_be_finished_is_the_reason_only_where_there_is_no_other(setting, monkeypatch):
    def full(*arguments: object) -> None:
        raise UserError("log.duckdb was not written: the disk is full")

    monkeypatch.setattr(LogActor, "close", full)
    assert "log.duckdb was not written" in setting.ended(Trainer(setting.step(1)))
    assert setting.ended(Trainer(end=remote(UserError("search failed")))) == "search failed"


class Answers:
    """Ray, as far as the writer and the health ask it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import ray

        self.done: set[object] = set()
        self.dead: dict[object, Exception] = {}
        monkeypatch.setattr(ray, "get", self.get)
        monkeypatch.setattr(ray, "wait", self.wait)

    def get(self, call, timeout=None):
        if call.actor in self.dead:
            raise self.dead[call.actor]
        return call

    def wait(self, calls, num_returns=1, timeout=None):
        assert timeout == 0, "nobody waits for a busy process"
        ready = [call for call in calls if call.actor in self.done or call.actor in self.dead]
        return ready, [call for call in calls if call not in ready]


class Call:
    def __init__(self, actor: Actor, arguments: tuple[object, ...]) -> None:
        self.actor, self.arguments = actor, arguments


class Actor:
    """Takes any call; counts them."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Actor:
        return self

    def remote(self, *arguments: object) -> Call:
        self.calls += 1
        return Call(self, arguments)


@pytest.fixture
def answers(monkeypatch) -> Answers:
    return Answers(monkeypatch)


def test_the_writer_is_asked_through_ray_and_its_faults_are_lines(answers):
    actor = Actor()
    writer = watchdog.RayWriter(actor, FOLDER, 60.0)
    assert writer.close("failed").arguments == ("failed", "")
    for error, line in (
        (remote(UserError("the disk is full; free some space")), "^the disk is full; free some space$"),
        (DiedError("LogActor"), rf"^the log writer died \(process 77 on 10.0.0.3\); {GO_ON}$"),
        (GetTimeoutError("Get timed out"), f"^the log writer has not answered for 60 s; {GO_ON}$"),
    ):
        answers.dead[actor] = error
        with pytest.raises(UserError, match=line):
            writer.poll()


def test_a_writer_that_stands_still_is_waited_for_once(answers, monkeypatch):
    import ray

    waits: list[float] = []

    def get(call, timeout):
        waits.append(timeout)
        raise GetTimeoutError("Get timed out")

    monkeypatch.setattr(ray, "get", get)
    writer = watchdog.RayWriter(Actor(), FOLDER, 1800.0)
    for ask in (writer.poll, lambda: writer.close("failed")):
        with pytest.raises(UserError, match="has not answered"):
            ask()
    assert waits == [1800.0, watchdog.POLL_S]


def test_a_dead_process_is_found_and_a_busy_one_is_not(answers):
    busy, idle, dead = Actor(), Actor(), Actor()
    health = ActorHealth({"busy": busy, "idle": idle, "training 1": dead}, every_s=0.0)
    answers.done = {idle}
    assert [health.dead() for _ in range(5)] == [""] * 5
    assert busy.calls == dead.calls == 1, "one ping under way is enough"
    assert idle.calls > 4
    answers.dead[dead] = DiedError("WorkerDict")
    assert health.dead() == "the training worker died (process 77 on 10.0.0.3)"


def test_a_process_out_of_reach_for_a_moment_is_asked_again(answers):
    actor = Actor()
    health = ActorHealth({"server 0": actor}, every_s=0.0)
    answers.dead[actor] = ActorUnavailableError("the network is down", None)
    assert [health.dead() for _ in range(3)] == [""] * 3
    answers.dead[actor] = DiedError("vLLMHttpServer")
    assert "rollout server died" in health.dead()


def test_processes_are_asked_at_most_once_a_second(answers):
    actor, now = Actor(), [0.0]
    health = ActorHealth({"server 0": actor}, clock=lambda: now[0])
    answers.done = {actor}
    for moment in range(100):
        now[0] = moment / 50
        health.dead()
    assert actor.calls == 3, "a ping at the start, and one after each of two looks"


def test_the_first_line_is_one_line_without_colours():
    assert plain_line(ValueError("\n\n \x1b[36mfirst\x1b[39m \nsecond")) == "first"
    assert plain_line(ValueError("")) == "ValueError"
    assert reason(remote(ValueError("a\nb"))) == "ValueError: a"
    assert role("SomethingElse") == "process SomethingElse"


def test_a_run_that_a_watch_stopped_is_not_told_to_resume():
    watched = final_error(RuntimeError("x"), FOLDER, "stopped by watch kl at step 2: actor/ref_kl is 5")
    assert str(watched).endswith("is 5; start a new run with a lower actor.optim.lr")
    assert str(final_error(RuntimeError("x"), FOLDER, "an episode failed")) == f"an episode failed; {GO_ON}"


def test_the_notes_of_an_error_of_ours_are_told():
    error = UserError("no judge answers")
    error.add_note("while scoring with reward 'judge'")
    assert reason(remote(error)) == "no judge answers; while scoring with reward 'judge'"
    assert str(final_error(remote(error), FOLDER)) == "no judge answers; while scoring with reward 'judge'"


def test_an_actor_of_which_ray_knows_nothing_is_still_a_line():
    ended = final_error(ActorDiedError(), FOLDER)
    assert str(ended) == (
        f"a process of the run died: The actor died unexpectedly before finishing this task.; {GO_ON}"
    )
