"""Every algorithm on the made-up world, from the same cold start, at equal generated tokens.

    python bench/algorithms.py [--only ppo grpo …] [--seeds 0 1 2] [--jobs 2] [--workspace DIR]

Each run is `srl train --algo NAME` on one thread with the `tiny` preset: 128 episodes a step, as 16 groups of
8 where the algorithm compares a group. Validation (512 questions, greedy) is every two steps. All figures of
a table are up to the same number of tokens that the policy generated, the largest that every run reached.
Runs that are in `bench/results/algorithms.json` are not made again, so the bench can be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.learning import command, prepared

import srl.store
from srl.workspace import Workspace

RESULTS = Path(__file__).parent / "results" / "algorithms.json"
ALGORITHMS = ("ppo", "grpo", "rloo", "turn_rloo", "gspo", "cispo", "reinforce", "reinforce_plus_plus")
SETTINGS = ("trainer.threads=1", "trainer.test_freq=2", "trainer.save_freq=0", "trainer.sample_freq=0",
            "eval.test_questions=1")  # fmt: skip


def made(workspace: Path, algo: str, seed: int, steps: int) -> dict[str, Any]:
    """One run: its validations, and the tokens that were generated before each of them."""
    options = [part for text in SETTINGS for part in ("--set", text)]
    summary = command("train", "--algo", algo, "--seed", str(seed), "--steps", str(steps), *options, "--json")
    with srl.store.open(workspace / "runs" / summary["run_id"]) as log:
        val = log.execute("SELECT step, em FROM steps WHERE phase = 'val' ORDER BY step").fetchall()
        written = log.execute(
            "SELECT step, trajectories * response_length FROM steps WHERE phase = 'train' ORDER BY step"
        ).fetchall()
    return {
        "steps": steps,
        "seconds": round(summary["seconds"], 1),
        "val": [
            {"step": step, "tokens": round(sum(tokens for at, tokens in written if at <= step)),
             "em": round(em, 4)}
            for step, em in val
        ],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--workspace", type=Path)
    given = parser.parse_args()
    os.environ.update({"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    saved: dict[str, Any] = {"format": 1, "runs": {}}
    if RESULTS.exists():
        saved = json.loads(RESULTS.read_text(encoding="utf-8"))
    writing = threading.Lock()

    def make(key: str) -> None:
        algo, seed = key.split("/")
        run = made(workspace.root, algo, int(seed), given.steps)
        with writing:
            saved["runs"][key] = run
            RESULTS.write_text(json.dumps(saved, indent=1) + "\n", encoding="utf-8")
            print(key, "EM", run["val"][-1]["em"], file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(given.workspace or Path(folder))
        os.environ["SRL_WORKSPACE"] = str(workspace.root)
        prepared(workspace.root)
        keys = [f"{algo}/{seed}" for seed in given.seeds for algo in given.only]
        with ThreadPoolExecutor(given.jobs) as pool:
            for _ in pool.map(make, [key for key in keys if key not in saved["runs"]]):
                pass


if __name__ == "__main__":
    main()
