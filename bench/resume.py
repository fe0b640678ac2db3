"""Kill training at random moments, resume it, and compare it with an uninterrupted run.

    python bench/resume.py [--kills 20] [--steps 8] [--out FILE] [-- OPTIONS OF SRL TRAIN]

Each kill is SIGKILL: one in five while the process starts up, one in five while it writes a checkpoint, the
others at a random moment of one of the next three training steps. When a run
ends before all kills are spent, another is started. Both runs are deterministic
(`rollout.deterministic=true`) and write a checkpoint each step. Exits with 1 unless every metric (times
excepted), every watch that fired, every sampled token and every weight is the same to the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import srl.store
from srl.store import read_records
from srl.workspace import Workspace

SRL = str(Path(sys.executable).with_name("srl"))
RESULTS = Path(__file__).parent / "results" / "resume.json"
STEPS_AHEAD = 3
MOST_MISSES = 5
"""Runs in a row that end before their first kill, after which it is given up."""
CHECKPOINT_S = 0.05
"""Seconds after the first file of a checkpoint in which a kill comes."""
TIMES = ("timing_s/", "perf/throughput")
TIMED = ("state.json", "manifest.json")
NO_STEPS = ["--steps", "0", "--set", "trainer.val_before_train=false", "--set", "eval.test_questions=1"]


def differences(found: Path, expected: Path) -> list[str]:
    """In what the run `found` is not the run `expected`; empty when they are the same to the last bit."""
    ours, theirs = _metrics(found), _metrics(expected)
    wrong = [f"{'/'.join(map(str, key))} {ours.get(key)} instead of {theirs.get(key)}"
             for key in sorted(ours.keys() | theirs.keys()) if ours.get(key) != theirs.get(key)]  # fmt: skip
    if _episodes(found) != _episodes(expected):
        wrong.append("other episodes")
    if _fired(found) != _fired(expected):
        wrong.append("other watches fired")
    files, known = _files(found), _files(expected)
    wrong += [
        f"file {name}" for name in sorted(files.keys() | known.keys()) if files.get(name) != known.get(name)
    ]
    return wrong


def _metrics(run: Path) -> dict[tuple[str, int, str], float]:
    """Every metric of every step and evaluation, times excepted."""
    with srl.store.open(run) as log:
        rows = log.execute("SELECT phase, step, name, value FROM metrics").fetchall()
    return {(phase, step, name): value for phase, step, name, value in rows if not name.startswith(TIMES)}


def _fired(run: Path) -> list[dict[str, Any]]:
    """The watches that fired, in order."""
    with srl.store.open(run) as log:
        return [{**row, "run_id": ""} for row in srl.store.rows(log, "FROM watches ORDER BY number")]


def _episodes(run: Path) -> list[tuple[Any, ...]]:
    """What was sampled and what it taught, token by token, in the order of the log."""
    with srl.store.open(run) as log:
        records = read_records(log)
    return [
        (item.trajectory.phase, item.trajectory.step, item.trajectory.id, item.trajectory.token_ids,
         item.trajectory.logprobs, [search.query for search in item.trajectory.searches],
         item.score.value if item.score else None, item.advantages and list(item.advantages))
        for item in records
    ]  # fmt: skip


def _files(run: Path) -> dict[str, str]:
    """Digests of the newest checkpoint's files, but for those with the run's seconds in them."""
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = [path for path in last.rglob("*") if path.is_file() and path.name not in TIMED]
    return {str(path.relative_to(last)): _digest(path) for path in files}


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix == ".pt":  # a zip file, with dates; the tensors' bytes are what counts
        data = repr(_plain(torch.load(path, weights_only=True))).encode()
    return sha256(data).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.dtype), sha256(value.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Kill:
    """When a process was killed, and which checkpoint was the newest then."""

    during: str
    after_s: float
    checkpoint: str | None


@dataclass
class Process:
    """`srl` with some arguments; what it says goes to a file."""

    arguments: list[str]
    said: Path

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        with self.said.open("wb") as out:
            self.popen = subprocess.Popen([SRL, *self.arguments], stdout=out, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, *marks: str) -> bool:
        """Until a line begins with one of `marks`; False when the process ended before."""
        while self.popen.poll() is None:
            if any(line.startswith(marks) for line in self.text().splitlines()):
                return True
            time.sleep(0.01)
        return any(line.startswith(marks) for line in self.text().splitlines())

    def kill_after(self, seconds: float) -> bool:
        """Kill it in `seconds`; False when it ended by itself before."""
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
            return True
        return False

    def wait_for_file(self, folder: Path, pattern: str) -> None:
        """Until a file in `folder` matches, or the process has ended."""
        self.wait_until(lambda: next(folder.glob(pattern), None) is not None)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Until `holds()`, or the process has ended."""
        while self.popen.poll() is None and not holds():
            time.sleep(0.001)

    def finish(self) -> None:
        if self.popen.wait() != 0:
            raise SystemExit(f"srl {' '.join(self.arguments)} failed:\n{self.text()}")


class Trial:
    """One workspace, one run left alone in it, and the runs that are killed."""

    def __init__(self, workspace: Workspace, options: list[str], seed: int) -> None:
        self.workspace, self.options, self.rng = workspace, options, random.Random(seed)
        self.said = workspace.root / "said.txt"
        self.new_process([*self.options, *NO_STEPS]).finish()  # world, index and cold start
        process = self.new_process(self.options)
        process.wait_for("run ")
        self.startup_s = time.perf_counter() - process.began
        process.finish()
        self.training_s = time.perf_counter() - process.began - self.startup_s
        self.alone = self.newest()

    def newest(self) -> Path:
        return self.workspace.all_runs()[-1]

    def new_process(self, options: list[str]) -> Process:
        return Process(["--workspace", str(self.workspace.root), "train", *options], self.said)

    def victim(self, kills: int, steps: int) -> tuple[Path, list[Kill]]:
        """A run that is killed at most `kills` times and resumed until it ends."""
        done, process = list[Kill](), self.new_process(self.options)
        process.wait_for("run ")
        run = self.newest()
        while len(done) < kills:
            during = self._moment(bool(done))
            delay = self.rng.uniform(0, self._wait_for(during, process, run, steps))
            if not process.kill_after(delay):
                break
            found = sorted(path.name for path in run.glob("checkpoints/step-*"))
            done.append(Kill(during, round(delay, 3), found[-1] if found else None))
            process = self.new_process(["--resume", "--run", run.name])
        process.finish()
        return run, done

    def _moment(self, begun: bool) -> str:
        """What the next kill is in the middle of; the first process has to begin its run."""
        draw = self.rng.random()
        if draw < 0.2:
            return "startup" if begun else "training"
        return "checkpoint" if draw < 0.4 else "training"

    def _wait_for(self, during: str, process: Process, run: Path, steps: int) -> float:
        """Wait until what the kill is in the middle of begins; the seconds in which it may come."""
        if during == "startup":
            return self.startup_s
        process.wait_for("run ", "resuming ")
        if during == "checkpoint":
            process.wait_for_file(run / "checkpoints", ".step-*.tmp-*")
            return CHECKPOINT_S
        wanted = min(_newest_step(run) + self.rng.randrange(STEPS_AHEAD), steps - 2)
        process.wait_until(lambda: _newest_step(run) >= wanted)
        return self.training_s / steps


def _newest_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name[-6:]) for path in run.glob("checkpoints/step-*")), default=0)


def measure(workspace: Workspace, options: list[str], kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs that are killed `kills` times in all, each compared with the one that was left alone."""
    trial, done, wrong, runs, missed = Trial(workspace, options, seed), list[Kill](), list[str](), 0, 0
    while len(done) < kills:
        run, more = trial.victim(kills - len(done), steps)
        done, runs = done + more, runs + 1
        wrong += [f"{run.name}: {text}" for text in differences(run, trial.alone)]
        print(f"{len(done)} kills, {runs} runs, {len(wrong)} differences", file=sys.stderr)
        missed = 0 if more else missed + 1
        if missed == MOST_MISSES:
            raise SystemExit("a run ended before it could be killed: give it more --steps")
    return {
        "format": 1,
        "kills": len(done),
        "runs": runs,
        "steps": steps,
        "identical": not wrong,
        "differences": wrong[:20],
        "startup_s": round(trial.startup_s, 2),
        "training_s": round(trial.training_s, 2),
        "when": [asdict(kill) for kill in done],
        "options": options,
        "torch": torch.__version__,
        "machine": platform.machine(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("options", nargs="*", help="further options of `srl train`, after --")
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    sets = ("rollout.deterministic=true", "trainer.save_freq=1", "trainer.test_freq=2",
            "trainer.max_ckpt_to_keep=2")  # fmt: skip
    options = [
        *given.options,
        "--steps",
        str(given.steps),
        *(part for each in sets for part in ("--set", each)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Workspace(Path(folder)), options, given.kills, given.steps, given.seed)
    given.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    verdict = "identical" if found["identical"] else "NOT identical"
    print(f"{found['kills']} kills in {found['runs']} runs: {verdict}")
    raise SystemExit(0 if found["identical"] else 1)


if __name__ == "__main__":
    main()
