"""Compare learning on verl with learning in one process: the same steps, seed and questions, two curves.

    python bench/verl_learning.py [--algos grpo ppo] [--steps 12] [--seed 0] [--workspace DIR]

Both backends start from the same cold-started model of the made-up world, whose test entities occur in no
training world. verl uses two FSDP2 workers over gloo and two replicas of our torch engine, because the
machine has no GPU. Each row is a run of `srl train`; the curves are greedy exact match on validation.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.learning import picture, prepared, rl_row

from srl.workspace import Workspace

ROOT = Path(__file__).parent
RESULTS = ROOT / "results" / "verl_learning.json"
PICTURE = ROOT.parent / "docs" / "verl-learning.svg"
BACKENDS = ("local", "verl")


def arguments_of(algo: str, backend: str, steps: int, questions: int) -> list[str]:
    every = max(1, steps // 4)
    return [
        "--backend", backend, "--algo", algo, "--steps", str(steps), "--set", f"trainer.test_freq={every}",
        "--set", "trainer.save_freq=0", "--set", f"eval.val_questions={questions}",
        "--set", f"eval.test_questions={questions}",
    ]  # fmt: skip


def measure(algos: list[str], steps: int, seed: int, questions: int, workspace: Path) -> dict[str, Any]:
    prepared(workspace)
    rows: dict[str, Any] = {}
    for algo in algos:
        for backend in BACKENDS:
            row = rl_row(workspace, arguments_of(algo, backend, steps, questions), seed)
            rows[f"{algo}, {backend}"] = {**row, **agreement(rows, algo, row)}
            print(algo, backend, row["val"], "test EM", row["end"]["em"], file=sys.stderr, flush=True)
    return rows


def agreement(rows: dict[str, Any], algo: str, row: dict[str, Any]) -> dict[str, float]:
    """How far the sampled exact match of training is from the local run's, step by step."""
    local = rows.get(f"{algo}, local")
    if local is None:
        return {}
    gaps = [abs(row["train_sampled"][step] - value) for step, value in local["train_sampled"].items()]
    return {"largest_gap_to_local_train_em": round(max(gaps), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--algos", nargs="+", default=["grpo", "ppo"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--questions", type=int, default=256)
    parser.add_argument("--workspace", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(asked.workspace or Path(folder))
        os.environ["SRL_WORKSPACE"] = str(workspace.root)
        rows = measure(asked.algos, asked.steps, asked.seed, asked.questions, workspace.root)
    about = {"format": 1, "steps": asked.steps, "seed": asked.seed, "questions": asked.questions,
             "cores": len(os.sched_getaffinity(0)), "rows": rows}  # fmt: skip
    RESULTS.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    picture({name: [row] for name, row in rows.items()}, PICTURE)


if __name__ == "__main__":
    main()
