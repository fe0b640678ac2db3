"""A log that many read while it is written, and whose writers are killed.

    python bench/log_readers.py [--readers 20] [--steps 1000] [--kills 200] [--seed 0] [--smoke] [--out FILE]

First a process writes `--steps` steps of scripted episodes and finishes the log, while `--readers` processes
read it over and over, and `srl inspect web` answers one request after another. Every read must show whole
steps, from the first on without a gap, and no fewer than the read before.

Then processes are killed with SIGKILL at random moments while they write, finish, resume, prune or merge a
log. After each kill the log must open with every step that was finished, whole, and the next process goes on
from there. A process that ends before its kill is counted as such, and another is started. Exits with 1
unless all of that holds every time. `--smoke` does a little of each, and writes nothing without `--out`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import duckdb

from srl.store import LogWriter, Record, RunInfo, reading
from srl.store.merge import merge_logs
from srl.store.parts import FINISHED
from srl.store.prune import Rule, plan, prune
from srl.trajectory import Hit, Passage, Question, Score, Search, Segment, Trajectory

RESULTS = Path(__file__).parent / "results" / "log_readers.json"
RUN = "20260101T000000Z-made-grpo-s0-0002"
EPISODES, SEGMENTS = 8, 4
STEPS_A_PROCESS = 60
"""Steps that a process writes before it ends by itself, more than are compacted at once."""
MOST_STEPS = 240
"""Steps of a log after which the kills go on in a new one."""
KEPT_FAILURES = 20
LONGER = 1.2
"""Kills come at a random moment of so many times what an action takes."""
PAGES = ("", "/trajectories", "/trajectories?verdict=correct&sort=-reward")
"""Pages of a run."""
WHOLE = """
SELECT step, coalesce(t.n, 0), coalesce(s.n, 0), coalesce(q.n, 0) FROM steps
LEFT JOIN (SELECT step, count(DISTINCT id) AS n FROM trajectories GROUP BY step) AS t USING (step)
LEFT JOIN (SELECT step, count(*) AS n FROM segments GROUP BY step) AS s USING (step)
LEFT JOIN (SELECT step, count(*) AS n FROM searches GROUP BY step) AS q USING (step) ORDER BY step
"""
_PROCESSES = multiprocessing.get_context("forkserver")
"""Processes that have their imports behind them, so that most kills fall into the work."""
_PROCESSES.set_forkserver_preload(["srl.store.merge", "srl.store.prune"])


class BrokenLog(Exception):  # noqa: N818 - what was found
    """A log shows something else than the steps that were finished."""


def records(step: int) -> list[Record]:
    """The episodes of a step: one search and one answer each."""
    return [_record(step, number) for number in range(EPISODES)]


def _record(step: int, number: int) -> Record:
    asked = Question(f"q{step}-{number}", "who painted it?", ("Klee",), "made", "train", (), {})
    hits = tuple(Hit(Passage(f"p{rank}", '"Klee"\n' + "a painter " * 50), 9.0 - rank) for rank in range(3))
    ids = tuple(range(200))
    logprobs = tuple(-0.25 for _ in ids)
    segments = [
        Segment("prompt", ids, "Question: who painted it?", 0),
        Segment("policy", ids, "<search> painter </search>", 0, logprobs),
        Segment("observation", ids, "\n\n<information>Klee</information>\n\n", 0),
        Segment("policy", ids, "<answer> Klee </answer>", 1, logprobs),
    ]
    searches = [Search("painter", hits, "ok", 0.01, turn=0, shown=3)]
    made = Trajectory(asked, segments, searches, "answered", "Klee", 0, step, "train", 2, 1)
    values = [0.5] * len(made.token_ids)
    return Record(made, Score(1.0, {"em": 1.0}), values, values)


def writer_of(run: Path) -> LogWriter:
    """The writer of the log in `run`, which resumes where there is one."""
    return LogWriter(run / "log", RunInfo(run.name, "made", "grpo", started="2026-01-01T00:00:00+00:00"))


def whole_steps(log: duckdb.DuckDBPyConnection) -> dict[int, bool]:
    """The steps of a log, and whether each has its trajectories. Raises BrokenLog for a part of a step."""
    found = {}
    for step, *counts in log.execute(WHOLE).fetchall():
        if counts not in ([EPISODES, EPISODES * SEGMENTS, EPISODES], [0, 0, 0]):
            raise BrokenLog(f"step {step} has {counts} trajectories, segments and searches")
        found[step] = counts[0] > 0
    if sorted(found) != list(range(1, len(found) + 1)):
        raise BrokenLog(f"steps are missing, there are {sorted(found)}")
    return found


def steps_in(run: Path) -> dict[int, bool]:
    """As `whole_steps`; a damaged file is an error too."""

    def refuse(warning: str) -> None:
        raise BrokenLog(warning)

    return reading([run], whole_steps, warn=refuse)


# Readers


@dataclass
class Reads:
    """What a reader saw: how many reads, the slowest, and what failed."""

    reads: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def once(self, read: Callable[[], object]) -> None:
        """Count a read, timed; what it raises is a failure."""
        began = time.perf_counter()
        try:
            read()
        except Exception as error:  # every failure is counted, of whatever kind
            self.failures.append(f"{type(error).__name__}: {error}")
        self.reads += 1
        self.slowest_s = max(self.slowest_s, time.perf_counter() - began)


def read_on(run: Path, ended: Any, found: Any) -> None:
    """Read until `ended` is set, and once more; put the `Reads` into `found`."""
    mine, known = Reads(), 0

    def read() -> None:
        nonlocal known
        steps = len(steps_in(run))
        if steps < known:
            raise BrokenLog(f"{steps} steps, and {known} in the read before")
        known = steps

    last = False
    while not last:
        last = ended.is_set()
        mine.once(read)
    found.put((mine, known))


def write_all(run: Path, steps: int) -> None:
    """Write `steps` steps and finish the log."""
    with writer_of(run) as log:
        for step in range(1, steps + 1):
            log.write(step, "train", records(step), {"critic/score/mean": 1.0})


def measure_readers(workspace: Path, readers: int, steps: int) -> dict[str, Any]:
    """Readers in other processes and the page, while a process writes a log and finishes it."""
    run = workspace / "runs" / RUN
    writer_of(run).close("interrupted")  # a log that can be opened
    ended, results = _PROCESSES.Event(), _PROCESSES.Queue()
    crowd = [_PROCESSES.Process(target=read_on, args=(run, ended, results)) for _ in range(readers)]
    for process in crowd:
        process.start()
    with asking(workspace) as page:
        began = time.perf_counter()
        writer = _PROCESSES.Process(target=write_all, args=(run, steps))
        writer.start()
        writer.join()
        took = time.perf_counter() - began
        ended.set()
        done = [results.get() for _ in crowd]
        for process in crowd:
            process.join()
    failures = [text for reads, _ in done for text in reads.failures] + page.failures
    failures += [f"a reader ended with {known} of {steps} steps" for _, known in done if known != steps]
    if writer.exitcode:
        failures.append(f"the writer failed with exit code {writer.exitcode}")
    return {
        "readers": readers,
        "steps": steps,
        "seconds": round(took, 1),
        "reads": sum(reads.reads for reads, _ in done),
        "slowest_read_s": round(max(reads.slowest_s for reads, _ in done), 2),
        "pages": page.reads,
        "slowest_page_s": round(page.slowest_s, 2),
        "failed": len(failures),
        "failures": failures[:KEPT_FAILURES],
    }


@contextmanager
def asking(workspace: Path) -> Iterator[Reads]:
    """`srl inspect web`, which is asked for the pages of the run, one after another, until the body ends."""
    found, over = Reads(), Event()
    command = [str(Path(sys.executable).with_name("srl")), "--workspace", str(workspace), "inspect", "web"]
    with subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = urlsplit(server.stdout.readline().strip())

        def ask() -> None:
            while not over.is_set():
                for page in PAGES:
                    found.once(partial(get, address.netloc, f"/run/{RUN}{page}"))

        thread = Thread(target=ask)
        thread.start()
        try:
            yield found
        finally:
            over.set()
            thread.join()
            server.terminate()


def get(host: str, path: str) -> None:
    """Ask for a page. Raises BrokenLog for another answer than the page, whole and without a warning."""
    connection = HTTPConnection(host, timeout=600)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200 or '<p class="warning"' in text:
        raise BrokenLog(f"{path}: {answer.status}")


# Kills


@dataclass(frozen=True)
class Kill:
    """What a killed process did, after how many seconds of it, and the steps that were in its log."""

    action: str
    after_s: float
    steps: int


def write(run: Path, first: int, told: Any) -> None:
    """Write steps from `first` on; `told` gets each that is finished."""
    log = writer_of(run)
    log.drop_steps_after(first - 1)
    for step in range(first, first + STEPS_A_PROCESS):
        log.write(step, "train", records(step), {})
        told.send(step)
    log.close("interrupted")


def finish(run: Path, first: int, told: Any) -> None:
    """Finish the log."""
    writer_of(run).finish()


def prune_half(run: Path, first: int, told: Any) -> None:
    """Prune all steps but each second one."""
    prune(run / "log", {(one.step, one.phase) for one in plan(run / "log", Rule(keep_every=2))})


def merge(run: Path, first: int, told: Any) -> None:
    """Merge the log into a new directory."""
    merge_logs([run], merged(run))


def merged(run: Path) -> Path:
    """Where the log is merged to."""
    return run.parent / f"{run.name}-merged"


ACTIONS = {"write": write, "finish": finish, "resume": write, "prune": prune_half, "merge": merge}
"""A finished log is resumed by writing to it."""


def work(action: str, run: Path, first: int, told: Any) -> None:
    """What the killed process does: say that it starts, and act."""
    told.send(0)
    ACTIONS[action](run, first, told)
    told.close()


class Trial:
    """One log and the processes that are killed at it."""

    def __init__(self, run: Path, rng: random.Random) -> None:
        self.run, self.rng = run, rng
        self.steps: dict[int, bool] = {}
        self.kills: list[Kill] = []
        self.ended: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        """How long each action took when it was last left alone; the first time it is."""

    def once(self) -> None:
        """Start a process, kill it at a random moment, and check what is left. Raises BrokenLog."""
        action = self.choose()
        first = max(len(self.steps) + 1 - self.rng.choice((0, 0, 3)), 1)
        here, there = _PROCESSES.Pipe(duplex=False)
        process = _PROCESSES.Process(target=work, args=(action, self.run, first, there))
        process.start()
        there.close()
        here.recv()
        began = time.perf_counter()
        known = self.seconds.get(action)
        process.join(known and self.rng.uniform(0, LONGER * known))
        after = time.perf_counter() - began
        process.kill()
        process.join()
        told = list(_received(here))
        if process.exitcode == 0:
            self.ended[action] += 1
            self.seconds[action] = after
        elif process.exitcode and process.exitcode > 0:
            raise BrokenLog(f"{action} failed with exit code {process.exitcode}")
        else:
            self.kills.append(Kill(action, round(after, 4), len(self.steps)))
        self.check(action, first, told, done=process.exitcode == 0)

    def choose(self) -> str:
        """An action that the log's state allows."""
        if (self.run / "log" / FINISHED).exists():
            return self.rng.choice(("resume", "resume", "prune", "merge"))
        if not self.steps:
            return "write"
        return self.rng.choice(("write", "write", "finish", "finish", "prune", "merge"))

    def check(self, action: str, first: int, told: list[int], *, done: bool) -> None:
        """Compare the log with what was finished. Raises BrokenLog."""
        found = steps_in(self.run) if (self.run / "log" / "manifest.json").exists() else {}
        if action in ("write", "resume"):
            self.check_written(found, first, told)
        elif found.keys() != self.steps.keys():
            raise BrokenLog(f"{action}: {len(found)} steps, {len(self.steps)} before")
        elif action == "prune":
            last = max(found)
            pruned = {step: held and (step % 2 == 0 or step == last) for step, held in self.steps.items()}
            if found not in ([pruned] if done else [self.steps, pruned]):
                raise BrokenLog("prune: neither as it was, nor pruned")
        elif found != self.steps:
            raise BrokenLog(f"{action}: trajectories are gone")
        if action == "merge" and merged(self.run).exists():
            if steps_in(merged(self.run)) != self.steps:
                raise BrokenLog("merge: the merged log has other steps")
            shutil.rmtree(merged(self.run))
        self.steps = found

    def check_written(self, found: dict[int, bool], first: int, told: list[int]) -> None:
        """Steps before `first` are as before; those told are there, and at most one more, written last."""
        kept = {step: held for step, held in found.items() if step < first}
        if kept != {step: held for step, held in self.steps.items() if step < first}:
            raise BrokenLog("write: steps before the first that was written again have changed")
        if told and not len(found) - 1 <= told[-1] <= len(found):
            raise BrokenLog(f"write: {told[-1]} steps were finished, {len(found)} are in the log")
        if not all(found[step] for step in told):
            raise BrokenLog("write: a finished step has no trajectories")


def _received(pipe: Any) -> Iterator[int]:
    """What was sent through a pipe until its other end was closed."""
    try:
        while True:
            yield pipe.recv()
    except (EOFError, OSError):
        return


def measure_kills(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kills at random moments, in as many logs as it takes, up to the first that broke one."""
    rng, done, ended, failures = random.Random(seed), list[Kill](), Counter[str](), list[str]()
    logs = 0
    while len(done) < kills and not failures:
        trial = Trial(folder / f"{RUN}-{logs}", rng)
        logs += 1
        while len(done) + len(trial.kills) < kills and len(trial.steps) < MOST_STEPS and not failures:
            try:
                trial.once()
            except Exception as error:  # an error of the check as well
                failures.append(f"log {logs}, kill {len(done) + len(trial.kills)}: {error}")
        done += trial.kills
        ended += trial.ended
        print(f"{len(done)} kills in {logs} logs", file=sys.stderr)
        shutil.rmtree(trial.run, ignore_errors=True)
    return {
        "kills": len(done),
        "during": dict(sorted(Counter(kill.action for kill in done).items())),
        "ended_before": dict(sorted(ended.items())),
        "logs": logs,
        "failures": failures,
        "when": [asdict(kill) for kill in done],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="2 readers, 40 steps, 3 kills")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    readers, steps, kills = (2, 40, 3) if given.smoke else (given.readers, given.steps, given.kills)
    with tempfile.TemporaryDirectory() as folder:
        read = measure_readers(Path(folder, "read"), readers, steps)
        print(f"{read['reads']} reads, {read['pages']} pages, {read['failed']} failed", file=sys.stderr)
        killed = measure_kills(Path(folder, "killed"), kills, given.seed)
    found = {
        "format": 1, "readers": read, "kills": killed, "cores": os.cpu_count(), "machine": platform.machine(),
        "duckdb": duckdb.__version__,
    }  # fmt: skip
    out = given.out or (None if given.smoke else RESULTS)
    if out:
        out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(f"{read['failed']} of {read['reads'] + read['pages']} reads failed", end="; ")
    print(f"{killed['kills']} kills, {len(killed['failures'])} broke the log")
    raise SystemExit(1 if read["failures"] or killed["failures"] else 0)


if __name__ == "__main__":
    main()
