"""Whether two runs are the same to the last bit, and a run that is killed at random moments and resumed.

    python tests/kills.py --kills 3 --steps 8 --seed 1 --out FILE -- OPTIONS OF SRL TRAIN

Each kill is SIGKILL: one in five while the process starts up, one in five while it writes a checkpoint, the
others in one of the next training steps. When a run ends before all kills are spent, another is started.
Exits with 1 unless every metric (times excepted), every watch that fired, every sampled token and every
weight is that of a run left alone.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

import srl.store
from srl.store import read_records
from srl.workspace import Workspace

SRL = str(Path(sys.executable).with_name("srl"))
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


class Process:
    """`srl train` with some arguments; what it says goes to a file."""

    def __init__(self, workspace: Workspace, arguments: list[str]) -> None:
        self.began, self.said = time.perf_counter(), workspace.root / "said.txt"
        command = [SRL, "--workspace", str(workspace.root), "train", *arguments]
        with self.said.open("wb") as out:
            self.popen = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def text(self) -> str:
        return self.said.read_text(encoding="utf-8", errors="replace")

    def wait_until(self, holds: Callable[[], object]) -> None:
        """Until `holds()`, or the process has ended."""
        while self.popen.poll() is None and not holds():
            time.sleep(0.002)

    def wait_for_run(self) -> None:
        """Until it says which run it starts or resumes."""
        self.wait_until(
            lambda: any(line.startswith(("run ", "resuming ")) for line in self.text().splitlines())
        )

    def kill_after(self, seconds: float) -> bool:
        """Kill it in `seconds`; False when it ended by itself before."""
        try:
            self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            return True
        return False

    def finish(self) -> float:
        """Wait for the end; the seconds that it took in all."""
        if self.popen.wait() != 0:
            raise SystemExit(f"srl train failed:\n{self.text()}")
        return time.perf_counter() - self.began


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max((int(path.name[-6:]) for path in run.glob("checkpoints/step-*")), default=0)


def killed(
    rng: random.Random, process: Process, run: Path, steps: int, startup_s: float, step_s: float
) -> bool:
    """Kill `process` at a random moment; False if it ended before."""
    draw, most_s = rng.random(), startup_s
    if draw >= 0.2:
        process.wait_for_run()
        if draw < 0.4:
            most_s = CHECKPOINT_S
            process.wait_until(lambda: next((run / "checkpoints").glob(".step-*.tmp-*"), None))
        else:
            most_s = step_s
            wanted = min(newest_step(run) + rng.randrange(STEPS_AHEAD), steps - 2)
            process.wait_until(lambda: newest_step(run) >= wanted)
    return process.kill_after(rng.uniform(0, most_s))


def measure(workspace: Workspace, options: list[str], kills: int, steps: int, seed: int) -> dict[str, Any]:
    """Runs that are killed `kills` times in all, each compared with the one that was left alone."""
    rng, count, wrong, missed = random.Random(seed), 0, list[str](), 0
    Process(workspace, [*options, *NO_STEPS]).finish()  # world, index and cold start
    process = Process(workspace, options)
    process.wait_for_run()
    startup_s = time.perf_counter() - process.began
    training_s = process.finish() - startup_s
    alone = workspace.all_runs()[-1]
    while count < kills:
        process, before = Process(workspace, options), count
        process.wait_for_run()
        run = workspace.all_runs()[-1]
        while count < kills and killed(rng, process, run, steps, startup_s, training_s / steps):
            count += 1
            process = Process(workspace, ["--resume", "--run", run.name])
        process.finish()
        wrong += [f"{run.name}: {text}" for text in differences(run, alone)]
        missed = 0 if count > before else missed + 1
        if missed == MOST_MISSES:
            raise SystemExit("a run ended before it could be killed: give it more --steps")
    return {"kills": count, "identical": not wrong, "differences": wrong[:20]}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kills", "steps", "seed"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="further options of `srl train`, after --")
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    sets = ("rollout.deterministic=true", "trainer.save_freq=1", "trainer.test_freq=2",
            "trainer.max_ckpt_to_keep=2")  # fmt: skip
    options = [*given.options, "--steps", str(given.steps)]
    options += [part for each in sets for part in ("--set", each)]
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Workspace(Path(folder)), options, given.kills, given.steps, given.seed)
    given.out.write_text(json.dumps(result), encoding="utf-8")
    raise SystemExit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
