"""Inject every kind of fault into a run on verl, one after the other, and resume it each time.

    python bench/verl_faults.py [--only NAME …] [--at WORKSPACE] [--out FILE] [-- OPTIONS OF SRL TRAIN]

The run uses this machine's CPUs; `srl serve retriever` answers its searches. Each fault is injected after a
step. The run must then either continue, or end within a time limit with exit code 2 and one line that names
the failure, without leaving a process behind. `srl train --resume` must then continue it. At the end, the log
must have every step and evaluation once. Exits with 1 if any of this fails. The full-disk fault needs a
separate file system, which only root can mount; without one it is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import srl.store
from srl.workspace import Workspace

SRL = str(Path(sys.executable).with_name("srl"))
RESULTS = Path(__file__).parent / "results" / "verl_faults.json"
SMALL = (
    "trainer.save_freq=1", "trainer.test_freq=1", "eval.val_questions=8", "eval.test_questions=8",
    "sft.steps=3", "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2",
    "trainer.sample_freq=0", "cluster.agent_workers=2", "search.timeout_s=5",
)  # fmt: skip
WATCHDOG_S = 60
WHOLE = "every step once"
START_S, END_S, LEFT_S = 400, 240, 120
"""Seconds for a step to appear, for a run to end after a fault, and for Ray's own helpers to notice."""


class Broken(Exception):  # noqa: N818 - what became of the trial
    """The trial cannot go on."""


@dataclass
class Place:
    """A workspace, a search server, and the process of a run."""

    workspace: Path
    said_in: Path
    more: list[str]
    port: int = 0
    server: subprocess.Popen[bytes] | None = None
    process: subprocess.Popen[bytes] | None = None
    said: int = 0

    @property
    def run(self) -> Path:
        """The newest run."""
        return Workspace(self.workspace).find_run("last")

    @property
    def block(self) -> Path:
        """A file beside the runs, which fills their disk."""
        return self.workspace / "runs" / ".block"

    def srl(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "SRL_WORKSPACE": str(self.workspace), "OMP_NUM_THREADS": "1"}
        self.said = self.said_in.stat().st_size if self.said_in.exists() else 0
        with self.said_in.open("ab") as out:
            return subprocess.Popen(
                [SRL, *arguments], stdout=out, stderr=out, env=environment, process_group=0
            )

    def text(self) -> str:
        """What the newest process said."""
        return self.said_in.read_bytes()[self.said :].decode(errors="replace")

    def told(self, step: int) -> bool:
        """Whether the newest process has told the figures of this step."""
        return re.search(rf"^step +{step}/", self.text(), re.MULTILINE) is not None

    def prepare(self) -> None:
        """World, index and cold start, made by a local run of no steps where they are not there yet."""
        options = [*self.more, "--steps", "0", *sets("trainer.val_before_train=false", *SMALL)]
        made = (self.workspace / "indexes").is_dir()
        if not made and self.srl("train", "--algo", "grpo", *options).wait() != 0:
            raise SystemExit(self.text())
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]

    def serve(self) -> None:
        """A search server at the same port as ever, once it answers."""
        (index,) = (self.workspace / "indexes").iterdir()
        command = [SRL, "serve", "retriever", "--index", str(index), "--port", str(self.port)]
        self.server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: answers(f"http://127.0.0.1:{self.port}/health"), 60)

    def stop_serving(self) -> None:
        if self.server is not None and self.server.poll() is None:
            self.server.terminate()
            self.server.wait(30)

    def begin(self, steps: int) -> None:
        searching = f"search.url=http://127.0.0.1:{self.port}"
        options = [
            *self.more,
            "--steps",
            str(steps),
            *sets(*SMALL, searching, f"cluster.watchdog_s={WATCHDOG_S}"),
        ]
        self.process = self.srl("train", "--backend", "verl", "--algo", "grpo", *options)

    def resume(self) -> None:
        self.process = self.srl("train", "--resume", "--run", self.run.name)

    def pids(self, title: str = "") -> list[int]:
        """The run's processes, by its directory in their environment; those whose title begins so."""
        mark = f"SRL_VERL_RUN={self.run.resolve()}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                ours = mark in (place / "environ").read_bytes().split(b"\0")
                if ours and title in (place / "cmdline").read_bytes().decode(errors="replace"):
                    found.append(int(place.name))
            except OSError:
                continue
        return sorted(found)


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def until(
    condition: Callable[[], bool], limit_s: float, process: subprocess.Popen[bytes] | None = None
) -> bool:
    """Whether `condition` came to hold in time, and before `process` ended."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if condition():
            return True
        if process is not None and process.poll() is not None:
            return condition()
        time.sleep(0.1)
    return False


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def send(place: Place, title: str, sent: signal.Signals) -> None:
    """A signal to one process of the run, of those whose title says so the first."""
    found = place.pids(title)
    if not found:
        raise Broken(f"the run has no process {title}")
    os.kill(found[0], sent)


def killed(title: str) -> Callable[[Place], None]:
    return lambda place: send(place, title, signal.SIGKILL)


def stopped(title: str) -> Callable[[Place], None]:
    return lambda place: send(place, title, signal.SIGSTOP)


def told(sent: signal.Signals, group: bool = False) -> Callable[[Place], None]:
    """A signal to `srl` itself, or to all that began with it, as a terminal does."""

    def send(place: Place) -> None:
        assert place.process is not None
        (os.killpg if group else os.kill)(place.process.pid, sent)

    return send


def restarted(place: Place) -> None:
    place.stop_serving()
    time.sleep(3)
    place.serve()


@dataclass(frozen=True)
class Fault:
    """What is done to the run, and the exit codes and words that are right; no code: it must go on."""

    does: Callable[[Place], None]
    codes: tuple[int, ...] = (2,)
    words: str = ""
    after: Callable[[Place], None] = lambda place: None
    needs_disk: bool = False


def fill(place: Place) -> None:
    try:
        with place.block.open("wb", buffering=0) as file:
            while True:
                file.write(b"\0" * 4096)
    except OSError:
        pass


def empty(place: Place) -> None:
    place.block.unlink()


FAULTS = {
    "a search server is restarted": Fault(restarted, codes=()),
    "a rollout worker is killed": Fault(killed("ray::AgentLoopWorker"), words="rollout worker died"),
    "a rollout server is killed": Fault(killed("ray::TorchServer"), words="rollout server died"),
    "a training worker is killed": Fault(killed("ray::WorkerDict"), words="training worker died"),
    "the trainer is killed": Fault(killed("ray::Runner"), words="the trainer died"),
    "the log's writer is killed": Fault(killed("ray::LogActor"), words="log writer died"),
    "the storage of batches is killed": Fault(killed("ray::SimpleStorage")),
    "a search server is gone for good": Fault(
        Place.stop_serving, words="search failed in", after=Place.serve
    ),
    "a training worker stands still": Fault(stopped("ray::WorkerDict"), words="no progress for"),
    "a rollout server stands still": Fault(stopped("ray::TorchServer"), words="no progress for"),
    "the disk is full": Fault(fill, words="the disk is full", after=empty, needs_disk=True),
    "Ray's raylet is killed": Fault(killed("raylet/raylet"), codes=(1, 2)),
    "srl is interrupted": Fault(told(signal.SIGINT, group=True), codes=(130,), words="interrupted"),
    "srl is terminated": Fault(told(signal.SIGTERM), codes=(143,)),
    "srl is killed": Fault(told(signal.SIGKILL), codes=(-9,)),
}


@dataclass
class Outcome:
    """What came of a fault."""

    fault: str
    step: int
    code: int | None
    seconds: float
    line: str
    others: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def hit(place: Place, name: str, step: int) -> Outcome:
    """Wait for `step`, do what the fault does, and see how the run takes it."""
    fault, process = FAULTS[name], place.process
    assert process is not None
    if not until(lambda: place.told(step), START_S, process):
        raise Broken(f"step {step} did not come before {name}")
    before = len(place.text().splitlines())
    began = time.monotonic()
    fault.does(place)
    over = (lambda: process.poll() is not None) if fault.codes else (lambda: place.told(step + 1))
    in_time = until(over, END_S, process)
    seconds = time.monotonic() - began
    said = place.text().splitlines()[before:]
    lines = [line for line in said if line.startswith("srl: ")]
    others = [line for line in said if not line.startswith(("step ", "val at ", "test at ", *lines[-1:]))]
    found = Outcome(name, step, process.poll(), round(seconds, 1), lines[-1] if lines else "", others)
    if not in_time:
        found.wrong.append("it hangs")
        process.kill()
        found.code = process.wait()
    check(found, fault)
    if fault.codes:
        until(lambda: not place.pids(), LEFT_S)
        found.left = [title_of(pid) for pid in place.pids()]
        for pid in place.pids():
            os.kill(pid, signal.SIGKILL)
    if found.left:
        found.wrong.append("processes are left")
    fault.after(place)
    return found


def check(found: Outcome, fault: Fault) -> None:
    if fault.codes and found.code not in fault.codes:
        found.wrong.append(f"exit code {found.code}")
    if not fault.codes and found.code is not None:
        found.wrong.append("it ended")
    if fault.words and fault.words not in found.line:
        found.wrong.append("another line was expected")
    if fault.codes and found.others:
        found.wrong.append("more than one line")


def title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except OSError:
        return "gone"


def entries(run: Path) -> list[tuple[str, int, int]]:
    """Every step and evaluation of the log, with how often it is there and its number of episodes."""
    query = "SELECT phase, step, count(*) FROM trajectories GROUP BY ALL ORDER BY ALL"
    return srl.store.reading([run], lambda log: log.execute(query).fetchall())


def expected(steps: int) -> list[tuple[str, int, int]]:
    train = [("train", step, 8) for step in range(1, steps + 1)]
    return [("test", 0, 8), ("test", steps, 8), *train, *(("val", step, 8) for step in range(steps + 1))]


@contextmanager
def disk(runs: Path) -> Iterator[bool]:
    """Whether the runs have a file system of their own, which can be full."""
    runs.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=400m", "tmpfs", str(runs)]
    mounted = subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(runs)], check=True)


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--at", type=Path, help="a workspace to use, in which something may be already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("more", nargs="*", help="options of srl train, after --")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = asked.at or Path(folder, "ws")
        with disk(workspace / "runs") as mounted:
            names = [name for name in asked.only if mounted or not FAULTS[name].needs_disk]
            report = reported(Place(workspace, Path(folder, "said.txt"), asked.more), names)
    report["left out"] = [name for name in asked.only if name not in names]
    asked.out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    wrong = [fault["fault"] for fault in report["faults"] if fault["wrong"]]
    print(f"wrong: {wrong or 'nothing'}; log: {report['log']}")
    sys.exit(1 if wrong or report["log"] != WHOLE else 0)


def reported(place: Place, names: list[str]) -> dict[str, Any]:
    """The whole trial; where it cannot go on, as far as it came."""
    outcomes: list[Outcome] = []
    log: object = "not looked at"
    try:
        trial(place, names, outcomes)
        found = entries(place.run)
        log = WHOLE if found == expected(len(names) + 1) else found
    except Broken as error:
        print(f"{error}:\n{place.text()[-4000:]}", file=sys.stderr)
        log = {"not finished": str(error), "as far as it came": entries(place.run)}
    finally:
        place.stop_serving()
        if place.process is not None and place.process.poll() is None:
            place.process.kill()
    return {
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "watchdog_s": WATCHDOG_S,
        "log": log,
        "faults": [asdict(outcome) for outcome in outcomes],
    }


def trial(place: Place, names: list[str], outcomes: list[Outcome]) -> None:
    """One fault a step, and the run resumed after each that ends it."""
    place.prepare()
    place.serve()
    place.begin(len(names) + 1)
    for step, name in enumerate(names, start=1):
        one = hit(place, name, step)
        outcomes.append(one)
        print(f"{name}: {one.seconds:.0f} s, code {one.code}: {one.line} {one.wrong or ''}", flush=True)
        if one.code is not None:
            place.resume()
    process = place.process
    assert process is not None
    if not until(lambda: process.poll() is not None, START_S) or process.returncode != 0:
        raise Broken("the run did not finish")


if __name__ == "__main__":
    main()
